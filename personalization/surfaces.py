"""Distances between the surfaces of an answer and of the truth, by MONAI: what Dice does not see.

Dice counts voxels, so that it forgives an island far away and punishes a thin organ for a voxel. HD95 finds
the island, and normalised surface Dice counts the boundary that is right to a tolerance.

MONAI takes seconds to import, so it is imported when the first distance is measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
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
    for index, classes in enumerate(labels):
        members = torch.tensor(tuple(classes))
        here, there = (torch.isin(each.long(), members)[None, None] for each in (predicted, truth))
        if bool(here.any()) and bool(there.any()):
            for name, value in _measured(here, there, spacing, tolerance).items():
                found[name][index] = value
    return found


_NAMES = ("hd95", "assd", "nsd")


def _measured(
    predicted: Tensor, truth: Tensor, spacing: Sequence[float] | None, tolerance: float
) -> dict[str, float]:
    """The three of one label; both masks [1, 1, *spatial] have a voxel."""
    from monai.metrics import (
        compute_average_surface_distance,
        compute_hausdorff_distance,
        compute_surface_dice,
    )

    options = {"include_background": True, "spacing": None if spacing is None else [*spacing]}
    # Of monai 1.6 about its own call. For good: `catch_warnings` in one thread ends that of another.
    warnings.filterwarnings("ignore", message=".*always_return_as_numpy", category=FutureWarning)
    hausdorff = compute_hausdorff_distance(predicted, truth, percentile=95, **options)
    average = compute_average_surface_distance(predicted, truth, symmetric=True, **options)
    surface = compute_surface_dice(predicted, truth, [tolerance], **options)
    return {"hd95": float(hausdorff), "assd": float(average), "nsd": float(surface)}
