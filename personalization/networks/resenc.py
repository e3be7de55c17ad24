"""nnU-Net's U-Net with a residual encoder (the ResEnc presets; Isensee et al., MICCAI 2024).

`ResidualEncoderUNet` of dynamic_network_architectures 0.4.4: a stem, stages of residual blocks, of which the
first has the stage's stride and takes its mean over it on the way past (ResNet-D), and a decoder of plain
convolutions. Biases of convolutions before an instance norm are left out: the norm subtracts them.

Legend: B batch, C channels, K classes, ... two or three spatial axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from personalization.networks import instance_norm
from personalization.networks.capabilities import Traits
from personalization.networks.monai.arguments import (
    MOST_BLOCKS,
    MOST_CHANNELS,
    MOST_KERNEL,
    MOST_STRIDE,
    Arguments,
    PerAxis,
)

# nnU-Net's bound on what doubling gives, by the number of spatial axes, and its blocks by stage.
_MOST_DOUBLED = {2: 512, 3: 320}
_BLOCKS = (1, 3, 4, 6, 6, 6, 6, 6, 6, 6)
_SLOPE = 0.01
_CONVOLUTIONS = {2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_NORMS = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
_POOLS = {2: functional.avg_pool2d, 3: functional.avg_pool3d}

Axes = tuple[int, ...]


class _Normed(nn.Module):
    """A convolution that keeps the sides but for its stride, and an instance norm."""

    def __init__(self, inputs: int, outputs: int, kernel: Axes, stride: Axes) -> None:
        super().__init__()
        padding = tuple(side // 2 for side in kernel)
        own = _CONVOLUTIONS[len(kernel)]
        self.conv = own(inputs, outputs, kernel, stride, padding, bias=False)  # type: ignore[arg-type]
        self.norm = _NORMS[len(kernel)](outputs, affine=True)

    @override
    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.norm(self.conv(features))
        return found


class _Residual(nn.Module):
    """Two convolutions, and the mean over the stride past them, projected where channels differ."""

    def __init__(self, inputs: int, outputs: int, kernel: Axes, stride: Axes) -> None:
        super().__init__()
        ones = (1,) * len(kernel)
        self.stride = None if stride == ones else stride
        self.conv1 = _Normed(inputs, outputs, kernel, stride)
        self.conv2 = _Normed(outputs, outputs, kernel, ones)
        self.skip = _Normed(inputs, outputs, ones, ones) if inputs != outputs else None

    @override
    def forward(self, features: Tensor) -> Tensor:
        past = features
        if self.stride is not None:
            past = _POOLS[len(self.stride)](past, self.stride, self.stride)
        if self.skip is not None:
            past = self.skip(past)
        return _activated(self.conv2(_activated(self.conv1(features))) + past)


class _Up(nn.Module):
    """A transposed convolution, and convolutions of its features beside the encoder's."""

    def __init__(self, inputs: int, outputs: int, kernel: Axes, stride: Axes, count: int) -> None:
        super().__init__()
        own = _TRANSPOSED[len(kernel)]
        self.up = own(inputs, outputs, stride, stride)  # type: ignore[arg-type]
        ones = (1,) * len(kernel)
        widths = [2 * outputs, *(outputs for _ in range(count))]
        self.convs = nn.ModuleList(_Normed(*each, kernel, ones) for each in pairwise(widths))

    @override
    def forward(self, features: Tensor, skip: Tensor) -> Tensor:
        found = torch.cat((self.up(features), skip), 1)
        for conv in self.convs:
            found = _activated(conv(found))
        return found


class ResEnc(nn.Module):
    """nnU-Net's `ResidualEncoderUNet`, of any kernels and strides, without deep supervision.

    `filters` take the place of `width`, which doubles by stage up to nnU-Net's 512 or 320. The first stride
    belongs to the first stage. With `track` its norms keep running statistics, which `blend` moves.
    """

    NAME = "resenc"

    def __init__(
        self,
        in_channels: int,
        classes: int,
        spatial_dims: int = 3,
        width: int = 16,
        filters: Sequence[int] | None = None,
        kernel_size: Sequence[PerAxis] | None = None,
        strides: Sequence[PerAxis] = (1, 2, 2, 2),
        blocks: Sequence[int] | None = None,
        decoder_convolutions: Sequence[int] | None = None,
        track: bool = False,
    ) -> None:
        super().__init__()
        ask = Arguments(self.NAME, spatial_dims, in_channels, classes, width)
        steps = [ask.each_axis(each) for each in ask.per_stage("strides", strides, MOST_STRIDE, least=2)]
        count = len(steps)
        if filters is None:
            filters = [min(width * 2**stage, _MOST_DOUBLED[spatial_dims]) for stage in range(count)]
        filters = ask.numbers("filters", filters, MOST_CHANNELS, count, count)
        given = ask.per_stage("kernel_size", kernel_size or [3] * count, MOST_KERNEL, count, count)
        kernels = [ask.each_axis(each) for each in given]
        blocks = ask.numbers("blocks", blocks or _BLOCKS[:count], MOST_BLOCKS, count, count)
        ups = count - 1
        convolutions = ask.numbers(
            "decoder_convolutions", decoder_convolutions or [1] * ups, MOST_BLOCKS, ups, ups
        )
        if any(side != 1 for side in steps[0]):
            ask.refuse("strides", "1 first, so that masks have the sides of the image", strides[0])
        if any(side % 2 == 0 for kernel in kernels for side in kernel):
            ask.refuse("kernel_size", "odd sides", given)
        self.in_channels = in_channels
        ones = (1,) * spatial_dims
        self.stem = _Normed(in_channels, filters[0], kernels[0], ones)
        self.stages = nn.ModuleList()
        inputs = filters[0]
        for outputs, kernel, stride, length in zip(filters, kernels, steps, blocks, strict=True):
            self.stages.append(
                nn.Sequential(
                    _Residual(inputs, outputs, kernel, stride),
                    *(_Residual(outputs, outputs, kernel, ones) for _ in range(length - 1)),
                )
            )
            inputs = outputs
        self.ups = nn.ModuleList(
            _Up(filters[level + 1], filters[level], kernels[level], steps[level + 1], convolutions[index])
            for index, level in enumerate(range(count - 2, -1, -1))
        )
        self.output = _CONVOLUTIONS[spatial_dims](filters[0], classes, 1)
        if track:
            instance_norm.track(self)
        each = tuple(math.prod(axis) for axis in zip(*steps, strict=True))
        head = (*(f"ups.{index}" for index in range(ups)), "output")
        # An instance norm needs two values at the bottom to have a variance.
        self.traits = Traits(
            "segmentation", head, spatial_dims, multiples=each, least_pixels=2 * math.prod(each)
        )

    @override
    def forward(self, image_BC: Tensor) -> Tensor:
        """Logits [B, K, ...] of images [B, C, ...]. Raises NetworkError for images that do not fit."""
        self.traits.check_images(image_BC, self.in_channels, self.NAME)
        features, skips = _activated(self.stem(image_BC)), []
        for stage in self.stages:
            features = stage(features)
            skips.append(features)
        features = skips.pop()
        for up in self.ups:
            features = up(features, skips.pop())
        logits: Tensor = self.output(features)
        return logits


def _activated(features: Tensor) -> Tensor:
    return functional.leaky_relu(features, _SLOPE)
