"""The Vision Transformer for classification: Dosovitskiy et al., An Image is Worth 16x16 Words, 2021.

Pre-norm blocks, a class token with a position of its own, biases in the query, key and value projections,
LayerNorm with eps 1e-6, and a head without a hidden layer. Parameter names are those commonly used for
published safetensors weights.

Legend: B batch, C channels, K classes, H and W height and width, N patches, R registers, D width, J heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.errors import NetworkError
from personalization.networks.backbone import BlockBackbone
from personalization.networks.capabilities import Traits

_EPS = 1e-6
# Ten times those of the largest published ones.
_MOST_BLOCKS, _MOST_REGISTERS = 512, 64
_DRAWN_STD = 0.02


class ViT(BlockBackbone):
    """A ViT; the defaults are those of ViT-B/16, with 85,798,656 parameters without the head.

    Args:
        size: height and width of the images, multiples of `patch`; the position embedding depends on them.
        heads: None gives one head per 64 of `width`, as in every published size.
        registers: tokens after the class token that have no position and carry no answer (Darcet et al.,
            Vision Transformers Need Registers, 2024).
    """

    centred_queries = False

    def __init__(
        self,
        in_channels: int,
        classes: int,
        size: Sequence[int] = (224, 224),
        patch: int = 16,
        width: int = 768,
        depth: int = 12,
        heads: int | None = None,
        mlp_ratio: int = 4,
        registers: int = 0,
    ) -> None:
        super().__init__()
        heads = max(width // 64, 1) if heads is None else heads
        _check(in_channels, classes, size, patch, width, depth, heads, registers)
        self.in_channels = in_channels
        self.size = (int(size[0]), int(size[1]))
        self.traits = Traits("classification", head=("head",), sides=self.size)
        self.width = width
        patches = (self.size[0] // patch) * (self.size[1] // patch)
        self.patch_embed = _PatchEmbedding(in_channels, patch, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + 1, width))
        self.registers = registers
        if registers:
            self.reg_token = nn.Parameter(torch.zeros(1, registers, width))
        self.blocks = nn.ModuleList(_Block(width, heads, mlp_ratio * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.head = nn.Linear(width, classes)

    def draw(self, generator: torch.Generator) -> None:
        """Redraw the class token, the positions and the registers, for `initialise`."""
        for parameter in (self.cls_token, self.pos_embed, *([self.reg_token] if self.registers else ())):
            nn.init.trunc_normal_(parameter, std=_DRAWN_STD, generator=generator)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Compute logits [B, K]. Raises NetworkError for images with a wrong size or channel count."""
        logits: Tensor = self.head(self.features(image_BCHW))
        return logits

    @override
    def features(self, image_BCHW: Tensor) -> Tensor:
        """Compute the class token after the last norm, [B, D]. Raises as `forward`."""
        return self.finish(self._embed(image_BCHW), self.depth)

    @property
    @override
    def depth(self) -> int:
        return len(self.blocks)

    @override
    def stem(self, image_BCHW: Tensor, blocks: int) -> Tensor:
        tokens_BTD = self._embed(image_BCHW)
        for block in self.blocks[: self.depth - blocks]:
            tokens_BTD = block(tokens_BTD)
        return tokens_BTD

    @override
    def finish(self, stem_BTD: Tensor, blocks: int) -> Tensor:
        for block in self.blocks[self.depth - blocks :]:
            stem_BTD = block(stem_BTD)
        normed: Tensor = self.norm(stem_BTD)
        return normed[:, 0]

    @override
    def query(self, image_BCHW: Tensor) -> Tensor:
        """Compute the query of FedIns, [B, D]: the class token, as in `features`.

        The last block does not update the other tokens, because they are not used.
        """
        normed: Tensor = self.norm(self.blocks[-1](self.stem(image_BCHW, 1), 1))
        return normed[:, 0]

    @property
    @override
    def query_width(self) -> int:
        return self.width

    @property
    @override
    def ssf_paths(self) -> tuple[str, ...]:
        """The patch embedding, both norms and all four projections of every block, and the last norm."""
        inner = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
        blocks = [f"blocks.{index}.{name}" for index in range(len(self.blocks)) for name in inner]
        return ("patch_embed.proj", *blocks, "norm")

    @override
    def last_ssf_paths(self, blocks: int) -> tuple[str, ...]:
        return self.ssf_paths[self.ssf_paths.index(f"blocks.{self.depth - blocks}.norm1") :]

    def _embed(self, image_BCHW: Tensor) -> Tensor:
        """Embed images as [B, 1 + R + N, D]: the class token, registers, and the patch tokens; the first and
        the last with their positions."""
        if tuple(image_BCHW.shape[1:]) != (self.in_channels, *self.size):
            raise NetworkError(
                f"vit: expected images [B, {self.in_channels}, {self.size[0]}, {self.size[1]}], found "
                f"{list(image_BCHW.shape)}; set such a `size` in the task, or resize the positions"
            )
        patches_BND = self.patch_embed(image_BCHW)
        token = self.cls_token.expand(patches_BND.shape[0], -1, -1)
        tokens_BTD = torch.cat((token, patches_BND), dim=1) + self.pos_embed
        if not self.registers:
            return tokens_BTD
        registers_BRD = self.reg_token.expand(patches_BND.shape[0], -1, -1)
        return torch.cat((tokens_BTD[:, :1], registers_BRD, tokens_BTD[:, 1:]), dim=1)


class _PatchEmbedding(nn.Module):
    """Embeds each patch as a token, row by row."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        projected: Tensor = self.proj(image_BCHW)
        return projected.flatten(2).transpose(1, 2)


class _Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens_BTD: Tensor, first: int | None = None) -> Tensor:
        """Let each token, or each of the `first` tokens, attend to all tokens."""
        width = tokens_BTD.shape[2]
        part = width // self.heads
        query, key, value = (
            projected.reshape(*tokens_BTD.shape[:2], self.heads, part).transpose(1, 2)
            for projected in self.qkv(tokens_BTD).chunk(3, dim=2)
        )
        if first is not None:
            query = query[:, :, :first]
        shares_BJTT = torch.softmax((query * part**-0.5) @ key.transpose(2, 3), dim=3)
        mixed: Tensor = self.proj((shares_BJTT @ value).transpose(1, 2).flatten(2))
        return mixed


class _Mlp(nn.Module):
    """Two layers with an exact GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(tokens_BTD)))
        return out


class _Block(nn.Module):
    """Attention and a perceptron, each preceded by a norm, with a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=_EPS)
        self.attn = _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=_EPS)
        self.mlp = _Mlp(width, hidden)

    def forward(self, tokens_BTD: Tensor, first: int | None = None) -> Tensor:
        """Update all tokens, or only the `first` ones."""
        kept_BTD = tokens_BTD if first is None else tokens_BTD[:, :first]
        updated_BTD = kept_BTD + self.attn(self.norm1(tokens_BTD), first)
        out: Tensor = updated_BTD + self.mlp(self.norm2(updated_BTD))
        return out


def _check(
    in_channels: int,
    classes: int,
    size: Sequence[int],
    patch: int,
    width: int,
    depth: int,
    heads: int,
    registers: int,
) -> None:
    if min(in_channels, patch, width, depth, heads) < 1 or classes < 2 or registers < 0:
        raise NetworkError(
            "vit: in_channels, patch, width, depth and heads must be positive, classes at least 2 and "
            f"registers no less than 0, found {in_channels}, {patch}, {width}, {depth}, {heads}, {classes} "
            f"and {registers}"
        )
    if depth > _MOST_BLOCKS or registers > _MOST_REGISTERS:
        raise NetworkError(
            f"vit: expected at most {_MOST_BLOCKS} blocks and {_MOST_REGISTERS} registers, found {depth} and "
            f"{registers}"
        )
    if len(size) != 2:
        raise NetworkError(f"vit: size must be two multiples of the patch, {patch}, found {list(size)}")
    check_patches(size, patch, "vit")
    if width % heads:
        raise NetworkError(f"vit: heads must divide the width, {width}, found {heads}")


def check_patches(size: Sequence[int], patch: int, where: str) -> None:
    """Raise NetworkError, with the nearest sizes, for sides that whole patches do not fill."""
    if not any(side < patch or side % patch for side in size):
        return
    smaller, larger = ([max(side // patch + more, 1) * patch for side in size] for more in (0, 1))
    kept = [side if side >= patch and not side % patch else None for side in size]
    near = [
        "x".join(str(keep or side) for keep, side in zip(kept, sides, strict=True))
        for sides in (smaller, larger)
    ]
    raise NetworkError(
        f"{where}: patches of {patch} pixels do not fill images of {'x'.join(map(str, size))}; the nearest "
        f"sizes are {' and '.join(dict.fromkeys(near))}: set one as `size` in the task"
    )
