"""Tensors of an EfficientNet-Lite0 under the names of its public releases, drawn at random."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Blocks in order: kernel, stride, expansion, channels (the paper's table 1 and the lite variant).
BLOCKS = [
    (3, 1, 1, 16),
    *[(3, stride, 6, 24) for stride in (2, 1)],
    *[(5, stride, 6, 40) for stride in (2, 1)],
    *[(3, stride, 6, 80) for stride in (2, 1, 1)],
    *[(5, 1, 6, 112)] * 3,
    *[(5, stride, 6, 192) for stride in (2, 1, 1, 1)],
    (3, 1, 6, 320),
]


def published(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}

    def add(conv: str, norm: str, out: int, above: int, kernel: int) -> None:
        spread = math.sqrt(2 / (above * kernel**2))
        tensors[f"{conv}.weight"] = spread * torch.randn(out, above, kernel, kernel, generator=draw)
        for name in ("weight", "running_var"):
            tensors[f"{norm}.{name}"] = 0.5 + torch.rand(out, generator=draw)
        for name in ("bias", "running_mean"):
            tensors[f"{norm}.{name}"] = 0.2 * torch.randn(out, generator=draw)
        tensors[f"{norm}.num_batches_tracked"] = torch.tensor(7)

    add("_conv_stem", "_bn0", 32, 3, 3)
    above = 32
    for index, (kernel, _, expansion, here) in enumerate(BLOCKS):
        inner = above * expansion
        if expansion > 1:
            add(f"_blocks.{index}._expand_conv", f"_blocks.{index}._bn0", inner, above, 1)
        add(f"_blocks.{index}._depthwise_conv", f"_blocks.{index}._bn1", inner, 1, kernel)
        add(f"_blocks.{index}._project_conv", f"_blocks.{index}._bn2", here, inner, 1)
        above = here
    add("_conv_head", "_bn1", 1280, 320, 1)
    tensors |= {"_fc.weight": torch.zeros(1000, 1280), "_fc.bias": torch.zeros(1000)}
    return tensors
