"""The U-Net for a spacing and a patch, by nnU-Net's rules (Isensee et al., Nature Methods 2021, Supplement).

An axis is pooled while it has 8 voxels and its spacing is less than twice the smallest one. Its kernels have
length 1 until the spacing comes within that factor, and 3 from there on. Coarse axes thus join the
convolutions where the voxels have become as coarse as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LEAST_SIDE = 4  # voxels along an axis at the bottom
RATIO = 2.0  # spacings closer than this are treated alike


@dataclass(frozen=True)
class Topology:
    """Kernels and strides by stage and axis, and the patch, padded to what the strides divide.

    The first stage has stride 1, the last one is the bottom. `divisor` is the product of strides by axis.
    """

    kernels: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    patch: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Number of resolutions, the full one included."""
        return len(self.strides)

    @property
    def divisor(self) -> tuple[int, ...]:
        """What divides the patch, by axis."""
        return tuple(math.prod(axis) for axis in zip(*self.strides, strict=True))


def topology(spacing: Sequence[float], patch: Sequence[float]) -> Topology:
    """Choose pooling and kernels for voxels of `spacing` (mm) and a patch of about `patch` voxels.

    nnU-Net's `get_pool_and_conv_props` with at least 4 voxels at the bottom. An axis that would be pooled
    alone needs 12 voxels.
    """
    axes = range(len(spacing))
    now, sides = [float(mm) for mm in spacing], [float(side) for side in patch]
    kernel = [1 for _ in axes]
    kernels: list[tuple[int, ...]] = []
    strides: list[tuple[int, ...]] = [tuple(1 for _ in axes)]
    while True:
        long = [axis for axis in axes if sides[axis] >= 2 * LEAST_SIDE]
        if not long:
            break
        finest = min(now[axis] for axis in long)
        pooled = [axis for axis in long if now[axis] / finest < RATIO]
        if len(pooled) == 1 and sides[pooled[0]] < 3 * LEAST_SIDE:
            break
        kernel = [
            3 if k == 3 or now[axis] / min(now) < RATIO else 1 for axis, k in zip(axes, kernel, strict=True)
        ]
        for axis in pooled:
            now[axis] *= 2
            sides[axis] = math.ceil(sides[axis] / 2)
        kernels.append(tuple(kernel))
        strides.append(tuple(2 if axis in pooled else 1 for axis in axes))
    kernels.append(tuple(3 for _ in axes))
    found = Topology(tuple(kernels), tuple(strides), tuple(math.ceil(side) for side in patch))
    padded = tuple(math.ceil(side / by) * by for side, by in zip(patch, found.divisor, strict=True))
    return Topology(found.kernels, found.strides, padded)


def features(stages: int, base: int, most: int) -> tuple[int, ...]:
    """Channels by stage: `base`, doubled with each stage up to `most`."""
    return tuple(min(base * 2**stage, most) for stage in range(stages))


def dynunet_arguments(
    spacing: Sequence[float], patch: Sequence[int], base: int, most: int = 320
) -> dict[str, Any]:
    """The topology for a spacing and a patch, as arguments of MONAI's DynUNet."""
    found = topology(spacing, patch)
    return as_dynunet(found, features(found.stages, base, most))


def as_dynunet(found: Topology, filters: Sequence[int]) -> dict[str, Any]:
    """A topology as arguments of MONAI's DynUNet, with nnU-Net's biases of transposed convolutions."""
    return {
        "kernel_size": [list(kernel) for kernel in found.kernels],
        "strides": [list(stride) for stride in found.strides],
        "filters": list(filters),
        "trans_bias": True,
    }


def feature_map_values(found: Topology, filters: Sequence[int], classes: int) -> int:
    """Count the values of all feature maps of one patch: nnU-Net's estimate of memory.

    Two convolutions per stage in the encoder and in the decoder, the transposed convolutions, and the output.
    The first convolution of a stage has the stage's stride.
    """
    sides = found.patch
    voxels: list[int] = []
    for stride in found.strides:
        sides = tuple(side // by for side, by in zip(sides, stride, strict=True))
        voxels.append(math.prod(sides))
    encoder = 2 * sum(f * n for f, n in zip(filters, voxels, strict=True))
    decoder = 3 * sum(f * n for f, n in zip(filters[:-1], voxels[:-1], strict=True))
    return encoder + decoder + classes * voxels[0]
