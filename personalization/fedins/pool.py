"""The SSF pool: M entries of scale and shift for every insertion point, each with its own key and head.

Legend: M entries, C selected entries, B batch, D all channels of all insertion points, Q width of a query,
K classes, F width of the features.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.errors import NetworkError
from personalization.fedins.lookup import PoolLookup
from personalization.networks.capabilities import Convolution, TransposedConvolution

_SSF_STD = 0.02
_KEY_STD = 0.02


@dataclass(frozen=True)
class Delta:
    """Scale, shift and head for each image; B is 1 if all images share them."""

    scale_BD: Tensor
    shift_BD: Tensor
    head_weight_BKF: Tensor
    head_bias_BK: Tensor


class HeadPool(nn.Module):
    """What the entries of every pool have: a key and a head; and `centre`, the mean query (a buffer)."""

    centre: Tensor

    def __init__(self, entries: int, query_width: int, classes: int, feature_width: int) -> None:
        super().__init__()
        if entries < 1:
            raise NetworkError(f"a pool needs at least one entry, found {entries}")
        self.keys = nn.Parameter(torch.zeros(entries, query_width))
        self.head_weight = nn.Parameter(torch.zeros(entries, classes, feature_width))
        self.head_bias = nn.Parameter(torch.zeros(entries, classes))
        self.register_buffer("centre", torch.zeros(query_width))

    @torch.no_grad()
    def draw_keys_and_heads(self, generator: torch.Generator, head: nn.Module | None) -> None:
        """Draw keys from a truncated normal (0.02), and heads unless they start from `head`."""
        nn.init.trunc_normal_(self.keys, std=_KEY_STD, generator=generator)
        if head is None:
            self.head_weight.normal_(0.0, math.sqrt(2 / self.head_weight.shape[2]), generator=generator)
            self.head_bias.zero_()
        else:
            weight, bias = head_of(head)
            self.head_weight.copy_(weight.expand_as(self.head_weight))
            self.head_bias.copy_(bias.expand_as(self.head_bias))

    @abstractmethod
    def draw(self, generator: torch.Generator, head: nn.Module | None = None) -> HeadPool:
        """Draw every entry separately, in place."""

    @abstractmethod
    def delta(self, picked: PoolLookup) -> Any:
        """Average the selected entries of each image (Eq. 9): a dataclass of tensors, images first."""

    def averaged(self, picked: PoolLookup, parameters: Sequence[Tensor]) -> list[Tensor]:
        """(1/C) sum_c of the selected entries of each parameter [M, ...]: [B, ...]."""
        return [parameter[picked.entries].mean(dim=1) for parameter in parameters]


class SsfPool(HeadPool):
    """The parameters that a federation trains and exchanges.

    A new pool is all zeros: call `draw`, or load a state.
    """

    def __init__(
        self, entries: int, channels: int, query_width: int, classes: int, feature_width: int
    ) -> None:
        super().__init__(entries, query_width, classes, feature_width)
        self.scale = nn.Parameter(torch.zeros(entries, channels))
        self.shift = nn.Parameter(torch.zeros(entries, channels))

    @torch.no_grad()
    @override
    def draw(self, generator: torch.Generator, head: nn.Module | None = None) -> SsfPool:
        """Draw every entry separately, so that entries differ, in place. Returns the pool.

        scale ~ N(1, 0.02), shift ~ N(0, 0.02), keys from a truncated normal (0.02). With `head`, a linear
        layer or 1x1 convolution, every entry's head starts from it. Otherwise heads are drawn by He's normal
        rule with fan-in F; the public code uses K F, which gives smaller weights than the rule intends.
        """
        self.scale.normal_(1.0, _SSF_STD, generator=generator)
        self.shift.normal_(0.0, _SSF_STD, generator=generator)
        self.draw_keys_and_heads(generator, head)
        return self

    @override
    def delta(self, picked: PoolLookup) -> Delta:
        """Average the selected entries of each image:

        delta(x) = (1/C) sum_c SSF_c   (Eq. 9)
        """
        return Delta(*self.averaged(picked, (self.scale, self.shift, self.head_weight, self.head_bias)))


def head_of(head: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the weight [K, F] and the bias [K] of a linear layer or a convolution of one pixel."""
    if (
        isinstance(head, Convolution)
        and not isinstance(head, TransposedConvolution)
        and set(head.kernel_size) == {1}
        and head.bias is not None
    ):
        return head.weight.flatten(1), head.bias
    if isinstance(head, nn.Linear) and head.bias is not None:
        return head.weight, head.bias
    raise NetworkError(f"expected a linear head or a 1x1 convolution, with bias, found {head}")
