"""Tell structures that are smaller than the members': a wider field of view, or other pixels.

Where only the central 1/z of each image looks like the members' whole images, the scans have structures about
z times smaller. No step of the lens cures that: the network has to see the slices z times larger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from model_store.lens.features import Images, Kind
from model_store.lens.fingerprint import Fingerprint, Seen, mean_shift, seen_of
from model_store.lens.fit import LIKE, Cohort, polarity_of
from model_store.preprocessing.lines import across
from model_store.task import LARGEST_SIDE, SIZE_MULTIPLE, Task

ZOOMS: Final = (1.5, 2.0, 2.5, 3.0)
# Whole images that are nearer are not looked at: two natural deviations.
_FAR: Final = 4.0
# The central part looks like the members' images up to this R.
_NEAR: Final = 3.0
# How far a side may be from so many times its own, as a share of that.
_BESIDE: Final = 0.05
# What interpolation leaves as it is.
_SHARP: Final[tuple[Kind, ...]] = ("field", "quantiles")


@dataclass(frozen=True)
class Scale:
    """How many times smaller structures are, and R of whole images (`before`) and of their central part.

    `grid` and `sides` are those of a lens (`Fitted`), of the central part.
    """

    zoom: float
    before: Mapping[Kind, float]
    after: Mapping[Kind, float]
    grid: float | None = None
    sides: float | None = None

    @property
    def left(self) -> float:
        """R of the central part over that of whole images."""
        return mean_shift(self.after) / mean_shift(self.before)


def scale_of(
    cohort: Cohort,
    fingerprint: Fingerprint,
    larger: Callable[[float], Cohort | None] | None = None,
) -> Scale | None:
    """The scale of a cohort of slices; None where its images are as large as the members', or far from them
    at every scale.

    `larger` gives the `middle` of the same slices, `enlarged` so many times from the scans themselves, where
    it can. Otherwise the central part is interpolated from the images, which blurs it. Costs a pass over the
    images, and four or five more where they are far. The central part has to be nearer in every kind of
    feature: noise and blur go as an image is enlarged, shading does not. Volumes are on a grid in
    millimetres, so that they have None.
    """
    if fingerprint.axes != 2:
        return None
    whole = fingerprint.shifts(_seen(cohort))
    if not whole or mean_shift(whole) <= _FAR:
        return None
    found = {zoom: _seen(cohort, zoom) for zoom in ZOOMS}
    parts = {zoom: fingerprint.shifts(each) for zoom, each in found.items()}
    zoom = min(ZOOMS, key=lambda each: mean_shift(parts[each]))
    sharp = min(ZOOMS, key=lambda each: mean_shift({k: r for k, r in parts[each].items() if k in _SHARP}))
    seen, part = found[zoom], parts[zoom]
    if larger is not None and (themselves := larger(sharp)) is not None:
        zoom, seen = sharp, seen_of(themselves())
        part = fingerprint.shifts(seen)
    if mean_shift(part) > _NEAR or not all(part[kind] < whole[kind] for kind in whole):
        return None
    shown = polarity_of(seen, fingerprint)
    if fingerprint.likeness < LIKE:
        return Scale(zoom, whole, part)
    return Scale(zoom, whole, part, shown.grid, shown.sides)


def enlarged(task: Task, zoom: float) -> Task | None:
    """The task with slices so many times larger, of which the middle is as those of the members: intensities
    are normalised by it. None where the network would see more than is allowed, or another scale: its sides
    are multiples of `SIZE_MULTIPLE`.
    """
    size = [SIZE_MULTIPLE * round(zoom * side / SIZE_MULTIPLE) for side in task.size]
    beside = max(abs(new / (zoom * side) - 1) for new, side in zip(size, task.size, strict=True))
    if max(size) > LARGEST_SIDE or beside > _BESIDE:
        return None
    normalisation = task.normalisation.model_copy(update={"middle": 1 / zoom})
    return task.model_copy(update={"size": tuple(size), "normalisation": normalisation})


def _seen(cohort: Cohort, zoom: float = 1.0) -> dict[Kind, Seen]:
    """What is seen of the central part of each image, interpolated to the size of the whole."""
    return seen_of((patient, images if zoom == 1 else _centre(images, zoom)) for patient, images in cohort())


def _centre(images_NCHW: Images, zoom: float) -> Images:
    """The central 1/zoom of each side, interpolated to the size of the whole."""
    places = [(side - 1) / 2 + (np.arange(side) - (side - 1) / 2) / zoom for side in images_NCHW.shape[2:]]
    return across(images_NCHW, places, first=2)


def middle(images_NCHW: Images, size: Sequence[int]) -> Images:
    """The central [H, W] pixels of larger images."""
    starts = [(there - side) // 2 for there, side in zip(images_NCHW.shape[2:], size, strict=True)]
    rows, columns = (slice(start, start + side) for start, side in zip(starts, size, strict=True))
    return images_NCHW[..., rows, columns]
