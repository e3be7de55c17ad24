"""Prompts in the place of scales and shifts: an ablation of FedIns (Feng et al., ICCV 2023, Table 2).

Deep visual prompts (Jia et al., Visual Prompt Tuning, ECCV 2022): before every block of a ViT, P learned
tokens are set between the class token and the patches. What the block makes of them is dropped, and the next
block gets tokens of its own. An entry of the pool has the tokens of all blocks, a key and a head.

Legend: M entries, B batch, L blocks, P prompt tokens, D width, Q width of a query, K classes, F width of the
features, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.errors import NetworkError
from personalization.fedins.lookup import PoolLookup
from personalization.fedins.network import InstanceAdaptive
from personalization.fedins.pool import HeadPool
from personalization.networks import Backbone
from personalization.networks.vit import ViT


@dataclass(frozen=True)
class PromptDelta:
    """Prompts and head for each image; B is 1 if all images share them."""

    prompts_BLPD: Tensor
    head_weight_BKF: Tensor
    head_bias_BK: Tensor


class PromptPool(HeadPool):
    """The prompts of every entry, with its key and head. A new pool is all zeros, as an `SsfPool`."""

    def __init__(self, entries: int, backbone: ViT, tokens: int, classes: int, blocks: int) -> None:
        super().__init__(entries, backbone.query_width, classes, backbone.width)
        if tokens < 1:
            raise NetworkError(f"prompts: expected at least one token, found {tokens}")
        self.prompts = nn.Parameter(torch.zeros(entries, blocks, tokens, backbone.width))
        fan_in = backbone.patch_embed.proj.weight[0].numel()
        # Xavier's bound over a patch and the width, as the prompts' public code has it.
        self._bound = math.sqrt(6 / (fan_in + backbone.width))

    @torch.no_grad()
    @override
    def draw(self, generator: torch.Generator, head: nn.Module | None = None) -> PromptPool:
        """Draw every entry separately, in place; keys and heads as `SsfPool.draw` does."""
        self.prompts.uniform_(-self._bound, self._bound, generator=generator)
        self.draw_keys_and_heads(generator, head)
        return self

    @override
    def delta(self, picked: PoolLookup) -> PromptDelta:
        return PromptDelta(*self.averaged(picked, (self.prompts, self.head_weight, self.head_bias)))


class PromptAdaptive(InstanceAdaptive):
    """A frozen ViT with a pool of prompts, before all blocks or the last `blocks`."""

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        entries: int,
        top: int,
        tokens: int = 10,
        blocks: int | None = None,
    ) -> None:
        if not isinstance(backbone, ViT):
            raise NetworkError(f"prompts: expected a vit, found a {type(backbone).__name__}")
        prompted_blocks = backbone.depth if blocks is None else blocks
        pool = PromptPool(entries, backbone, tokens, classes, prompted_blocks)
        super().__init__(backbone, classes, entries, top, pool, blocks)

    @override
    def adapted(self, delta: Any) -> AbstractContextManager[Backbone]:
        """Within the context, every block sees the prompts of its image."""
        assert isinstance(delta, PromptDelta)
        assert isinstance(self.backbone, ViT)
        return prompted(self.backbone, delta.prompts_BLPD)


@contextmanager
def prompted(backbone: ViT, prompts_BLPD: Tensor) -> Iterator[Backbone]:
    """Within the context, each of the last L blocks sees P more tokens. With B = 1 all images share them."""
    blocks, count = prompts_BLPD.shape[1:3]

    def insert(prompts_BPD: Tensor) -> Any:
        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            tokens_BTD, *others = inputs
            own = prompts_BPD.to(tokens_BTD.dtype).expand(len(tokens_BTD), -1, -1)
            return (torch.cat((tokens_BTD[:, :1], own, tokens_BTD[:, 1:]), dim=1), *others)

        return before

    def remove(_: nn.Module, __: Any, output_BTD: Tensor) -> Tensor:
        return torch.cat((output_BTD[:, :1], output_BTD[:, 1 + count :]), dim=1)

    handles = []
    for block, prompts_BPD in zip(backbone.blocks[-blocks:], prompts_BLPD.unbind(dim=1), strict=True):
        handles += [
            block.register_forward_pre_hook(insert(prompts_BPD)),
            block.register_forward_hook(remove),
        ]
    try:
        yield backbone
    finally:
        for handle in handles:
            handle.remove()
