"""Interpolate linearly along the axes of a volume, one axis after another.

Axes that become shorter come first, so the later ones have less to do: a fixed order takes several times as
long for a CT.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.float32]
# Places along an axis, fractional, within its voxels.
Places = NDArray[np.float64]


def nearest(places: Places) -> NDArray[np.intp]:
    """The voxel nearest to each place; of two, the one after."""
    return np.floor(places + 0.5).astype(np.intp)


def along(values: NDArray[np.float32], places: Places, axis: int) -> NDArray[np.float32]:
    """Interpolate one axis at `places`; the values themselves where those are its voxels in order."""
    side = values.shape[axis]
    if len(places) == side and np.array_equal(places, np.arange(side)):
        return values
    below = np.floor(places).astype(np.intp)
    share = (places - below).astype(np.float32)
    low: NDArray[np.float32] = values.take(below, axis)
    if not share.any():
        return low
    high: NDArray[np.float32] = values.take(np.minimum(below + 1, side - 1), axis)
    high -= low
    high *= share.reshape([-1 if each == axis else 1 for each in range(values.ndim)])
    high += low
    return high


def across(values: NDArray[np.float32], places: Sequence[Places], first: int = 0) -> NDArray[np.float32]:
    """Interpolate axes `first`, `first + 1`, …, those that become shorter before the others."""
    growth = [len(each) / values.shape[first + axis] for axis, each in enumerate(places)]
    for axis in sorted(range(len(places)), key=growth.__getitem__):
        values = along(values, places[axis], first + axis)
    return values


class Between:
    """Planes at fractional places, of which only the last two whole ones are kept."""

    def __init__(self, plane_at: Callable[[int], Plane]) -> None:
        self._plane_at = plane_at
        self._kept: OrderedDict[int, Plane] = OrderedDict()

    def __call__(self, place: float) -> Plane:
        """The plane at a place; it may be one that is kept, so it is not to be changed."""
        below = int(np.floor(place))
        share = np.float32(place - below)
        low = self._at(below)
        if share == 0:
            return low
        found = self._at(below + 1) - low
        found *= share
        found += low
        return found

    def _at(self, index: int) -> Plane:
        if index not in self._kept:
            self._kept[index] = self._plane_at(index)
            if len(self._kept) > 2:
                self._kept.popitem(last=False)
        return self._kept[index]
