"""Plan spacing, patch, batch, network and normalisation of a federation of volumes, by nnU-Net's rules.

A pure function of what the sites' merged fingerprint says (`Summary`), of the number of classes and of a
budget. The rules are those of nnU-Net v2 (`ExperimentPlanner`), checked against it by a test:

    spacing    the median by axis; a thick axis (> 3 times the others, < 1/3 of their voxels) takes its 10th
               percentile, but not below the others
    patch      first 256^3 voxels in the aspect of 1 / spacing, clipped to the median shape; while the feature
               maps exceed the budget, the axis that is longest relative to the median shape shrinks
    batch      as many patches as the budget allows, 5 % of all voxels at most, 2 at least
    CT         clipped to 0.5 and 99.5 percentile of the foreground; its mean and standard deviation
    others     z-score of every image; of its non-zero voxels, where cropping to them leaves less than 3/4

Where Locum differs, an argument says so: a `Budget` has the memory and the widths of the network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from training.planning.topology import LEAST_SIDE, Topology, feature_map_values, features, topology

ANISOTROPY = 3.0  # a thick axis: its spacing above, its voxels below those of the others by this factor
SAME = 1e-5  # mm; nnU-Net adds it to a thick axis that would become finer than the others
FIRST_VOLUME = 256**3  # voxels of the first patch
COVERED = 0.05  # share of all voxels in one batch, at most
LEAST_BATCH = 2
MASKED_BELOW = 0.75  # share kept by cropping to non-zero, below which only non-zero voxels normalise
REFERENCE = 560e6  # values of feature maps that fit in 8 GB, of a batch of 2
REFERENCE_GIGABYTES = 8.0
FEW_SLICES = 2 * LEAST_SIDE  # along a thick axis: below this it cannot be pooled once


@dataclass(frozen=True)
class Budget:
    """What a network may cost. `gigabytes` is in nnU-Net's measure: 8 hold 560e6 values of feature maps.

    `features` is the width of the first stage, doubled with each stage up to `most_features`.
    """

    name: str
    gigabytes: float
    features: int = 32
    most_features: int = 320


# The laptop's is one of time, not of memory: a second or two of one core for a step. Half of its channels
# would still take more than half of that. The others have nnU-Net's widths.
BUDGETS: Mapping[str, Budget] = {
    budget.name: budget
    for budget in (
        Budget("laptop", 0.6, features=16, most_features=160),
        Budget("gpu-8gb", 8),
        Budget("gpu-12gb", 12),
        Budget("gpu-24gb", 24),
        Budget("gpu-40gb", 40),
        Budget("gpu-80gb", 80),
    )
}


@dataclass(frozen=True)
class Intensities:
    """Foreground intensities of a channel over all cases, each of which counts alike."""

    low: float  # 0.5 percentile
    median: float
    high: float  # 99.5 percentile
    mean: float
    std: float


@dataclass(frozen=True)
class Summary:
    """What a plan needs to know of the training cases of all sites together.

    Axes are in one order throughout. `shape` and `extent` (mm) are after cropping to non-zero. `kept` is the
    share of voxels that this leaves. `intensities` has a channel's values, or None of one that is no CT.
    """

    cases: int
    spacing: tuple[float, ...]
    finest: tuple[float, ...]
    shape: tuple[float, ...]
    extent: tuple[float, ...]
    kept: float
    intensities: tuple[Intensities | None, ...] = field(default=(None,))


@dataclass(frozen=True)
class ChannelPlan:
    """How a channel is normalised. `ct` has the federation's intensities; without it, z-score per image."""

    ct: Intensities | None
    nonzero: bool


@dataclass(frozen=True)
class VolumePlan:
    """A plan of a 3-D network, with axes in the order of the summary. `shape` is the median, resampled."""

    spacing: tuple[float, ...]
    shape: tuple[float, ...]
    network: Topology
    filters: tuple[int, ...]
    batch: int
    channels: tuple[ChannelPlan, ...]

    @property
    def patch(self) -> tuple[int, ...]:
        """Voxels of a patch, by axis."""
        return self.network.patch


def target_spacing(summary: Summary) -> tuple[float, ...]:
    """Choose the spacing in mm that every scan is resampled to."""
    target = list(summary.spacing)
    worst = max(range(len(target)), key=target.__getitem__)
    others = [axis for axis in range(len(target)) if axis != worst]
    coarsest = max(target[axis] for axis in others)
    thick = target[worst] > ANISOTROPY * coarsest
    few = summary.shape[worst] * ANISOTROPY < min(summary.shape[axis] for axis in others)
    if thick and few:
        finest = summary.finest[worst]
        target[worst] = coarsest + SAME if finest < coarsest else finest
    return tuple(target)


def plan_volumes(summary: Summary, classes: int, budget: Budget) -> VolumePlan:
    """Plan a 3-D network for `classes` softmax classes, the background included."""
    spacing = target_spacing(summary)
    # A voxel at least: medians of different cases need not belong together.
    shape = tuple(float(max(round(mm / to), 1)) for mm, to in zip(summary.extent, spacing, strict=True))
    # nnU-Net computes with the thickest axis first, which decides between axes that are equal.
    thickest = max(range(len(spacing)), key=spacing.__getitem__)
    order = [thickest, *(axis for axis in range(len(spacing)) if axis != thickest)]
    found = _patch_within([spacing[axis] for axis in order], [shape[axis] for axis in order], classes, budget)
    network, values = found
    back = [order.index(axis) for axis in range(len(spacing))]
    patch_voxels = math.prod(network.patch)
    fitting = round(_capacity(budget) / values * 2)
    covered = round(math.prod(shape) * summary.cases * COVERED / patch_voxels)
    return VolumePlan(
        spacing,
        shape,
        _permuted(network, back),
        features(network.stages, budget.features, budget.most_features),
        max(min(fitting, covered), LEAST_BATCH),
        tuple(
            ChannelPlan(found, nonzero=found is None and summary.kept < MASKED_BELOW)
            for found in summary.intensities
        ),
    )


def _capacity(budget: Budget) -> float:
    return REFERENCE * budget.gigabytes / REFERENCE_GIGABYTES


def _patch_within(
    spacing: Sequence[float], shape: Sequence[float], classes: int, budget: Budget
) -> tuple[Topology, int]:
    """Shrink the first patch until its feature maps fit; returns the network and their number of values."""
    inverse = [1 / mm for mm in spacing]
    scale = (FIRST_VOLUME / math.prod(inverse)) ** (1 / 3)
    network = topology(spacing, [min(round(i * scale), side) for i, side in zip(inverse, shape, strict=True)])
    while (values := _values(network, classes, budget)) > _capacity(budget):
        relative = [side / of for side, of in zip(network.patch, shape, strict=True)]
        axis = max(range(len(shape)), key=lambda i: (relative[i], i))
        # Subtracting the divisor could skip sizes that a network with one pooling less has: ask again first.
        smaller = _less(network.patch, axis, network.divisor[axis])
        by = topology(spacing, smaller).divisor[axis]
        if network.patch[axis] - by < LEAST_SIDE:
            break  # a budget that no network fits
        network = topology(spacing, _less(network.patch, axis, by))
    return network, values


def _values(network: Topology, classes: int, budget: Budget) -> int:
    filters = features(network.stages, budget.features, budget.most_features)
    return feature_map_values(network, filters, classes)


def _less(patch: Sequence[int], axis: int, by: int) -> tuple[int, ...]:
    return tuple(side - by if i == axis else side for i, side in enumerate(patch))


def _permuted(network: Topology, back: Sequence[int]) -> Topology:
    def moved(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[i] for i in back)

    return Topology(
        tuple(map(moved, network.kernels)), tuple(map(moved, network.strides)), moved(network.patch)
    )


def advise(summary: Summary) -> tuple[Literal[2, 3], str]:
    """Say whether to train slices (2) or volumes (3), and why."""
    spacing = target_spacing(summary)
    shape = [mm / to for mm, to in zip(summary.extent, spacing, strict=True)]
    worst = max(range(len(spacing)), key=spacing.__getitem__)
    ratio = spacing[worst] / min(spacing)
    fewest = min(range(len(shape)), key=shape.__getitem__)
    if shape[fewest] < 1.5:
        return 2, "the scans are single slices"
    if shape[fewest] < FEW_SLICES and ratio > ANISOTROPY and worst == fewest:
        return 2, (
            f"a volume has {shape[worst]:.0f} slices {ratio:.1f} times as far apart as the voxels within "
            f"them: fewer than the {FEW_SLICES} that a 3-D network needs to pool along that axis once, and "
            "neighbouring slices show other anatomy"
        )
    if ratio > ANISOTROPY:
        return 3, (
            f"slices are {ratio:.1f} times as far apart as the voxels within them, so that the first stages "
            "work within slices"
        )
    return 3, "voxels are about as long in all directions"
