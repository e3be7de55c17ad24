"""Distances between the surfaces of an answer and of the truth: what Dice does not see.

Dice counts voxels, so that it forgives an island far away and punishes a thin organ for a voxel. HD95 finds
the island, and normalised surface Dice counts the boundary that is right to a tolerance.

A surface is the voxels of a mask with a neighbour outside of it, and distances are those of scipy's exact
transform. MONAI's metrics are the same in single precision, which the tests hold: they take seconds to import
and measure each distance once for each metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personalization.errors import LabelError


def surface_distances(
    predicted: Tensor,
    truth: Tensor,
    labels: Sequence[Sequence[int]],
    spacing: Sequence[float] | None = None,
    tolerance: float = 1.0,
) -> dict[str, Tensor]:
    """Measure each label of one scan: [L] float64 of `hd95`, `assd` and `nsd`.

    hd95: 95th percentile of the Hausdorff distance, the larger of both directions. assd: average symmetric
    surface distance. nsd: normalised surface Dice, the share of both surfaces that is within `tolerance` of
    the other (Nikolov et al., J Med Internet Res 2021). All are NaN of a label that the prediction or the
    truth lacks: there is no surface to measure from, and such scans are to be counted.

    Args:
        predicted, truth: class indices [*spatial] of any integer type, in two or three dimensions.
        labels: the classes of each label, of which it is the union.
        spacing: distances between neighbours along each axis; without it, distances are in pixels.
        tolerance: of `nsd`, in the unit of the distances.

    Raises LabelError if the shapes differ or the spacing does not fit them.
    """
    if predicted.shape != truth.shape:
        raise LabelError(f"prediction: expected shape {list(truth.shape)}, found {list(predicted.shape)}")
    if spacing is not None and len(spacing) != truth.ndim:
        raise LabelError(f"spacing: expected {truth.ndim} numbers, found {list(spacing)}")
    found = {name: torch.full((len(labels),), torch.nan, dtype=torch.float64) for name in _NAMES}
    answer, drawn = (each.cpu().numpy() for each in (predicted, truth))
    for index, classes in enumerate(labels):
        here, there = (np.isin(each, tuple(classes)) for each in (answer, drawn))
        if here.any() and there.any():
            for name, value in _measured(here, there, spacing, tolerance).items():
                found[name][index] = value
    return found


_NAMES = ("hd95", "assd", "nsd")


def _measured(
    predicted: NDArray[np.bool_],
    truth: NDArray[np.bool_],
    spacing: Sequence[float] | None,
    tolerance: float,
) -> dict[str, float]:
    """The three of one label, of which both masks have a voxel."""
    # Imported late: a process that measures no surface does without it.
    from scipy.ndimage import binary_erosion, distance_transform_edt

    box = _box(predicted | truth)
    surfaces = [mask[box] & ~binary_erosion(mask[box]) for mask in (predicted, truth)]
    # In float32, as MONAI: three steps of 0.4 mm are within a tolerance of 1.2.
    there, back = (
        torch.from_numpy(distance_transform_edt(~surface, sampling=spacing)[other].astype(np.float32))
        for surface, other in pairwise([surfaces[1], surfaces[0], surfaces[1]])
    )
    both = torch.cat([there, back])
    return {
        "hd95": max(float(torch.quantile(each, 0.95)) for each in (there, back)),
        "assd": float(both.mean()),
        "nsd": float((both <= tolerance).float().mean()),
    }


def _box(mask: NDArray[np.bool_]) -> tuple[slice, ...]:
    """The smallest box that has every voxel of a mask."""
    sides = []
    for axis in range(mask.ndim):
        others = tuple(other for other in range(mask.ndim) if other != axis)
        at = np.flatnonzero(mask.any(axis=others))
        sides.append(slice(int(at[0]), int(at[-1]) + 1))
    return tuple(sides)
