"""An answer beside its mask, label by label, and the scans of one patient together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from personalization.surfaces import surface_distances

Classes = NDArray[np.uint8]


@dataclass(frozen=True)
class Measure:
    """One label of an answer beside its mask.

    Attributes:
        found, drawn, both: voxels of the answer, of the mask, and of both.
        found_ml, drawn_ml: millilitres; None of an image.
        surface_dice: normalised surface Dice; NaN without two surfaces.
        hd95: 95th percentile of the Hausdorff distance in `unit`; NaN without two surfaces.
    """

    found: int
    drawn: int
    both: int
    found_ml: float | None
    drawn_ml: float | None
    surface_dice: float
    hd95: float

    @property
    def dice(self) -> float:
        """2|A∩B| / (|A| + |B|); NaN where neither is there."""
        total = self.found + self.drawn
        return 2 * self.both / total if total else math.nan


def measure(
    found: Classes,
    drawn: Classes,
    labels: Sequence[Sequence[int]],
    *,
    ignored: int,
    spacing: Sequence[float] | None,
    voxel_ml: float | None,
    tolerance: float,
) -> list[Measure]:
    """Measure every label of one scan.

    Args:
        found, drawn: class indices [H, W] or [I, J, K] on the scan's own grid.
        labels: the classes of each label, of which it is the union.
        ignored: value of the mask's places that do not count.
        spacing: millimetres between neighbours; None of an image, where distances are in pixels.
        voxel_ml: millilitres of a voxel; None of an image.
        tolerance: of surface Dice, in the unit of the distances.
    """
    known = drawn != ignored
    found, drawn = (np.where(known, each, np.uint8(0)) for each in (found, drawn))
    distances = surface_distances(
        torch.from_numpy(found), torch.from_numpy(drawn), labels, spacing, tolerance
    )
    measures = []
    for index, classes in enumerate(labels):
        here, there = np.isin(found, [*classes]), np.isin(drawn, [*classes])
        counts = [int(np.count_nonzero(each)) for each in (here, there, here & there)]
        volumes = [None if voxel_ml is None else count * voxel_ml for count in counts[:2]]
        surfaces = [float(distances[name][index]) for name in ("nsd", "hd95")]
        measures.append(Measure(*counts, *volumes, *surfaces))
    return measures


def merged(scans: Sequence[Measure]) -> Measure:
    """The scans of one patient, at least one: voxels together, distances in the mean of those with one."""
    return Measure(
        sum(each.found for each in scans),
        sum(each.drawn for each in scans),
        sum(each.both for each in scans),
        _total([each.found_ml for each in scans]),
        _total([each.drawn_ml for each in scans]),
        _mean([each.surface_dice for each in scans]),
        _mean([each.hd95 for each in scans]),
    )


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
