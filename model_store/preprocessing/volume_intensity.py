"""Normalise the channel of a volume, step by step, without a copy of it.

Every step is pointwise once its statistics are known. Those of 8 and 16 bit integers are counted by value, so
all steps together read the volume once. Those of wider types are taken plane by plane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from model_store.normalisation import Clip, Rescale, Step, Within, ZScore
from model_store.preprocessing.intensity import CONSTANT, Scale, moments_of

# Bins of the first look at values of wider types, by which percentiles are found in the second.
_BINS = 2**14

Region = NDArray[np.bool_]
# The planes of a channel, and for each whether a voxel is of the region; None where no step asks.
Planes = Callable[[], Iterator[tuple[NDArray[Any], Region | None]]]


@dataclass(frozen=True)
class _Pointwise:
    """One step: a scale, then an offset, of the voxels that it is for."""

    scale: Scale
    offset: float
    within: Within

    def apply(self, values: NDArray[np.float32], region: Region | None) -> NDArray[np.float32]:
        scaled = self.scale.apply(values)
        if self.offset:
            scaled += np.float32(self.offset)
        if self.within == "nonzero":
            return np.where(values != 0, scaled, values)
        if self.within == "region" and region is not None:
            scaled[~region] = 0
        return scaled


@dataclass(frozen=True)
class Normaliser:
    """What normalises a channel, plane by plane."""

    steps: tuple[_Pointwise, ...]

    def apply(self, values: NDArray[Any], region: Region | None = None) -> NDArray[np.float32]:
        """Normalise values of any type and shape to float32 of the same shape, never in place."""
        found = values.astype(np.float32)
        for step in self.steps:
            found = step.apply(found, region)
        return found


class _Values(Protocol):
    def ends(self, so_far: Normaliser, within: Within) -> tuple[float, float] | None: ...
    def percentiles(
        self, so_far: Normaliser, within: Within, wanted: tuple[float, float]
    ) -> tuple[float, float] | None: ...
    def moments(self, so_far: Normaliser, within: Within) -> tuple[float, float] | None: ...


def normaliser_of(planes: Planes, dtype: np.dtype[Any], steps: Sequence[Step]) -> Normaliser:
    """Compute the normaliser of a channel; its `planes` are read several times.

    A step that finds no voxel within its bounds (a channel of zeros, of which the non-zero ones are asked)
    changes nothing.
    """
    counted = dtype.kind == "b" or (dtype.kind in "iu" and dtype.itemsize <= 2)
    values: _Values = _Counted(planes) if counted else _Streamed(planes)
    so_far = Normaliser(())
    for step in steps:
        found = _pointwise(step, values, so_far)
        if found is not None:
            so_far = Normaliser((*so_far.steps, found))
    return so_far


def _pointwise(step: Clip | Rescale | ZScore, values: _Values, so_far: Normaliser) -> _Pointwise | None:
    within = step.within
    if isinstance(step, ZScore):
        moments: tuple[float, float] | None = (step.mean or 0.0, step.std or 1.0)
        if step.mean is None or step.std is None:
            moments = values.moments(so_far, within)
        if moments is None:
            return None
        mean = moments[0] if step.mean is None else step.mean
        deviation = moments[1] if step.std is None else step.std
        constant = step.std is None and deviation <= CONSTANT * max(abs(mean), 1e-30)
        return _Pointwise(Scale(-math.inf, math.inf, mean, 0.0 if constant else 1 / deviation), 0.0, within)
    if step.window is not None:
        bounds: tuple[float, float] | None = step.window
    elif step.percentiles is not None:
        bounds = values.percentiles(so_far, within, step.percentiles)
    else:
        bounds = values.ends(so_far, within)
    if bounds is None:
        return None
    low, high = bounds
    if isinstance(step, Clip):
        return _Pointwise(Scale(low, high, 0.0, 1.0), 0.0, within)
    span, (to_low, to_high) = high - low, step.to
    factor = (to_high - to_low) / span if span > CONSTANT * abs(low) else 0.0
    clip = (low, high) if step.clip else (-math.inf, math.inf)
    return _Pointwise(Scale(*clip, low, factor), to_low, within)


class _Counted:
    """Statistics of integers by how often each value occurs, outside of the region and inside."""

    def __init__(self, planes: Planes) -> None:
        least, most = _ends((plane, None) for plane, _ in planes())
        self._least, count = int(least), int(most) - int(least) + 1
        self._counts = np.zeros((2, count), np.int64)
        for plane, region in planes():
            values = plane.astype(np.int64) - self._least
            inside = np.ones(plane.shape, bool) if region is None else region
            self._counts[1] += np.bincount(values[inside], minlength=count)
            self._counts[0] += np.bincount(values[~inside], minlength=count)

    def _selected(self, so_far: Normaliser, within: Within) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The distinct values after the steps so far, and how often each occurs."""
        raw = np.arange(self._counts.shape[1]) + self._least
        values, counts = [], []
        for inside, own in enumerate(self._counts):
            if inside or within != "region":
                found = so_far.apply(raw, np.full(raw.shape, bool(inside)))
                chosen = (own > 0) & (found != 0) if within == "nonzero" else own > 0
                values.append(found[chosen])
                counts.append(own[chosen])
        return np.concatenate(values), np.concatenate(counts)

    def ends(self, so_far: Normaliser, within: Within) -> tuple[float, float] | None:
        values, _ = self._selected(so_far, within)
        return (float(values.min()), float(values.max())) if values.size else None

    def percentiles(
        self, so_far: Normaliser, within: Within, wanted: tuple[float, float]
    ) -> tuple[float, float] | None:
        values, counts = self._selected(so_far, within)
        return _percentiles(values, counts, 0, int(counts.sum()), wanted) if values.size else None

    def moments(self, so_far: Normaliser, within: Within) -> tuple[float, float] | None:
        values, counts = self._selected(so_far, within)
        if not values.size:
            return None
        total, wide = int(counts.sum()), values.astype(np.float64)
        mean = float((wide * counts).sum()) / total
        return mean, math.sqrt(float((np.square(wide - mean) * counts).sum()) / total)


class _Streamed:
    """Statistics of floats and wide integers, plane by plane."""

    def __init__(self, planes: Planes) -> None:
        self._planes = planes

    def _selected(self, so_far: Normaliser, within: Within) -> Iterator[NDArray[np.float32]]:
        for plane, region in self._planes():
            values = so_far.apply(plane, region)
            chosen = values.ravel()
            if within == "nonzero":
                chosen = values[values != 0]
            elif within == "region" and region is not None:
                chosen = values[region]
            if chosen.size:
                yield chosen

    def ends(self, so_far: Normaliser, within: Within) -> tuple[float, float] | None:
        least, most = _ends((plane, None) for plane in self._selected(so_far, within))
        return (least, most) if least <= most else None

    def percentiles(
        self, so_far: Normaliser, within: Within, wanted: tuple[float, float]
    ) -> tuple[float, float] | None:
        """Exact, in two passes: count in bins, then sort only the bins that have the values asked for."""
        ends = self.ends(so_far, within)
        if ends is None or ends[0] == ends[1]:
            return ends
        low, scale = ends[0], _BINS / (ends[1] - ends[0])

        def bins(values: NDArray[np.float32]) -> NDArray[np.int64]:
            return np.minimum(((values.astype(np.float64) - low) * scale).astype(np.int64), _BINS - 1)

        counts = np.zeros(_BINS, np.int64)
        for values in self._selected(so_far, within):
            counts += np.bincount(bins(values), minlength=_BINS)
        cumulative, total = np.cumsum(counts), int(counts.sum())
        found = []
        for percent in wanted:
            below = math.floor(percent / 100 * (total - 1))
            first, last = np.searchsorted(cumulative, [below, min(below + 1, total - 1)], side="right")
            parts: NDArray[np.float32] = np.empty(0, np.float32)
            own: NDArray[np.int64] = np.empty(0, np.int64)
            for values in self._selected(so_far, within):
                where = bins(values)
                # Ties, such as a background of zeros, take no memory.
                more, often = np.unique(values[(where == first) | (where == last)], return_counts=True)
                parts, inverse = np.unique(np.concatenate([parts, more]), return_inverse=True)
                own = np.bincount(inverse, np.concatenate([own, often])).astype(np.int64)
            before = int(cumulative[first] - counts[first])
            found.append(_percentiles(parts, own, before, total, (percent, percent))[0])
        return found[0], found[1]

    def moments(self, so_far: Normaliser, within: Within) -> tuple[float, float] | None:
        parts = self._selected(so_far, within)
        first = next(parts, None)
        return None if first is None else moments_of(_chained(first, parts))


def _percentiles(
    values: NDArray[np.float32],
    counts: NDArray[np.int64],
    before: int,
    total: int,
    wanted: tuple[float, float],
) -> tuple[float, float]:
    """np.percentile (linear) of `total` values, of which `before` are smaller than all of `values`."""
    order = np.argsort(values, kind="stable")
    cumulative = before + np.cumsum(counts[order])
    found = []
    for percent in wanted:
        place = percent / 100 * (total - 1)
        below = math.floor(place)
        ranks = np.searchsorted(cumulative, [below, min(below + 1, total - 1)], side="right")
        first, second = values[order][ranks].astype(np.float64)
        found.append(float(first + (second - first) * (place - below)))
    return found[0], found[1]


def _ends(planes: Iterator[tuple[NDArray[Any], None]]) -> tuple[float, float]:
    least, most = math.inf, -math.inf
    for plane, _ in planes:
        least, most = min(least, float(plane.min())), max(most, float(plane.max()))
    return least, most


def _chained(
    first: NDArray[np.float32], rest: Iterator[NDArray[np.float32]]
) -> Iterator[NDArray[np.float32]]:
    yield first
    yield from rest
