"""Restore a mask on the scan's own grid from a network's outputs on its grid, plane by plane.

Planes come in order along one axis of the network's grid, as `windows.slide` gives them. Each is interpolated
to the scan's voxels as soon as its neighbour is there, reduced to classes and forgotten.

Shape suffixes: K outputs of the network per voxel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from model_store.errors import ScanTooLarge
from model_store.preprocessing.forward import no_look
from model_store.preprocessing.geometry import MOST_ELEMENTS
from model_store.preprocessing.grid import VolumeGrid
from model_store.preprocessing.lines import Places, across, nearest
from model_store.preprocessing.slices import turned
from model_store.preprocessing.windows import slab_axis, slab_bytes
from model_store.task import Task

Outputs = Literal["probabilities", "logits"]

# float32 distinguishes no probability closer to 0 or 1, and the logarithm of 0 is not finite.
_FLOOR = np.float32(1e-30)
_CEILING = np.float32(1 - 2**-24)


def as_logits(probabilities_K: NDArray[np.float32], *, regions: bool) -> NDArray[np.float32]:
    """Logits [K, …] of probabilities: of a softmax up to a constant per voxel, which decides nothing."""
    p = np.maximum(probabilities_K, _FLOOR)
    found: NDArray[np.float32] = np.log(p)
    if regions:
        found -= np.log1p(-np.minimum(p, _CEILING))
    return found


def as_probabilities(logits_K: NDArray[np.float32], *, regions: bool) -> NDArray[np.float32]:
    """Softmax over K, or with `regions` the sigmoid of each."""
    if regions:
        # The hyperbolic tangent does not overflow.
        return np.asarray(np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * logits_K)), np.float32)
    exponentials = np.exp(logits_K - logits_K.max(axis=0))
    return np.asarray(exponentials / exponentials.sum(axis=0), np.float32)


def classes_of(outputs_K: NDArray[np.float32], task: Task, kind: Outputs) -> NDArray[np.uint8]:
    """Class indices of outputs [K, …]: the largest, the first of equals, or the task's combination of
    regions of a probability above one half."""
    if not task.regions:
        labels = np.zeros(outputs_K.shape[1:], np.uint8)
        best = outputs_K[0]
        for index in range(1, len(outputs_K)):
            above = outputs_K[index] > best
            # Indices grow, so the larger one is the later one; a masked copy takes twice as long.
            np.maximum(labels, above.view(np.uint8) * np.uint8(index), out=labels)
            best = np.maximum(best, outputs_K[index])
        return labels
    half = 0.0 if kind == "logits" else 0.5
    return task.classes_of_regions(output > half for output in outputs_K)


def check_volume_restorable(grid: VolumeGrid, task: Task) -> None:
    """Raise ScanTooLarge if the average over windows would need too much memory."""
    geometry = task.geometry
    assert geometry is not None
    axis = slab_axis_of(grid, task)
    needed = slab_bytes(grid.shape, geometry.patch, task.out_channels, axis)
    if needed > 4 * MOST_ELEMENTS:
        raise ScanTooLarge(
            f"{task.out_channels} outputs per voxel of {' x '.join(map(str, grid.shape))} voxels need "
            f"{needed / 2**30:.1f} GiB for the average over windows, more than the {MOST_ELEMENTS / 2**28:g} "
            f"GiB that are allowed for task '{task.name}'; send a part of the volume"
        )
    own = [each.count for index, each in enumerate(grid.axes) if index != axis]
    if task.out_channels * math.prod(own) > MOST_ELEMENTS:
        raise ScanTooLarge(
            f"{task.out_channels} outputs per voxel of a plane of {own[0]} x {own[1]} voxels are more than "
            f"the {MOST_ELEMENTS} that may be restored at once for task '{task.name}'; send a part of the "
            "volume, or resample it"
        )


def slab_axis_of(grid: VolumeGrid, task: Task) -> int:
    """The axis along which windows are averaged: the first by nnU-Net's rule, where the order of windows
    shows in half precision, else the one with the smallest slab."""
    geometry = task.geometry
    assert geometry is not None
    return 0 if geometry.window == "nnunet" else slab_axis(grid.shape, geometry.patch)


# Outputs on the scan's own voxels that are held together: 16 MiB, and some copies. A plane with more is done
# in strips.
_STRIP = 2**22


class _PlaneByPlane:
    """Brings planes of the network's grid to the scan's, and writes what `decide` makes of each.

    `nearest_along` says of each axis whether the nearest voxel is taken instead of an interpolated one.
    """

    def __init__(
        self,
        grid: VolumeGrid,
        axis: int,
        decide: Callable[[NDArray[np.float32]], NDArray[np.uint8]],
        nearest_along: tuple[bool, bool, bool],
        look: Callable[[], None],
    ) -> None:
        self._axis, self._decide, self._look = axis, decide, look
        places: list[Places] = []
        for own, is_nearest in zip(grid.axes, nearest_along, strict=True):
            found = own.in_network()
            places.append(nearest(found).astype(np.float64) if is_nearest else found)
        self._along = places[axis]
        self._across = [own for index, own in enumerate(places) if index != axis]
        self._side = grid.axes[axis].side
        self._sides = tuple(own.side for index, own in enumerate(grid.axes) if index != axis)
        # The mask in the scan's own order of axes, and a view of it in the network's; outside of a crop
        # there is background.
        self._own = np.zeros(grid.own, np.uint8, order="F")
        self._view = np.moveaxis(turned(self._own, grid.order)[grid.box], axis, 0)
        self._written, self._taken = 0, 0
        self._last: NDArray[np.float32] | None = None
        self._own_last = False

    def add(self, outputs_K: NDArray[np.float32]) -> None:
        if self._taken >= self._side or outputs_K.shape[1:] != self._sides:
            raise ValueError(
                f"expected {self._side} planes [K, {self._sides[0]}, {self._sides[1]}], found "
                f"{list(outputs_K.shape)} as plane {self._taken + 1}"
            )
        index, self._taken = self._taken, self._taken + 1
        until = int(np.searchsorted(self._along, index, side="right"))
        needed = until < len(self._along) and self._along[until] < index + 1
        if until == self._written and not needed:
            self._last = None
            return
        rows, columns = self._across
        at_once = max(1, _STRIP // (len(outputs_K) * max(1, len(columns))))
        own: NDArray[np.float32] | None = None
        for start in range(0, len(rows), at_once):
            self._look()
            strip = slice(start, start + at_once)
            across_strip = (rows[strip], columns)
            own = across(outputs_K, across_strip, first=1)
            last = self._last if self._own_last else None
            for place in range(self._written, until):
                share = np.float32(index - self._along[place])
                if share == 0:
                    found = own
                else:
                    if last is None:
                        assert self._last is not None
                        last = across(self._last, across_strip, first=1)
                    found = own + share * (last - own)
                self._view[place, strip] = self._decide(found)
        self._written = until
        # One strip is kept as it is on the scan's voxels; several would be all of the plane.
        self._own_last = at_once >= len(rows)
        self._last = own if self._own_last else outputs_K

    def finish(self) -> NDArray[np.uint8]:
        if self._taken != self._side:
            raise ValueError(f"expected {self._side} planes, found {self._taken}")
        return self._own


class VolumeRestorer:
    """Restores a mask, and on request a map of whole percents, from planes of a network's outputs.

    Args:
        grid: that `prepare_volume` returned.
        task: of the network.
        axis: of the network's grid, along which planes come.
        kind: what the planes hold; they are converted to what the geometry interpolates (`restore`).
        look: called before each plane, or each strip of a large one.
    """

    def __init__(
        self,
        grid: VolumeGrid,
        task: Task,
        axis: int = 0,
        kind: Outputs = "probabilities",
        look: Callable[[], None] = no_look,
    ) -> None:
        geometry = task.geometry
        assert geometry is not None
        self._task, self._kind, self._restore = task, kind, geometry.restore
        apart = grid.apart[1]
        self._nearest = (apart == 0, apart == 1, apart == 2)
        everywhere = (True, True, True)
        if self._restore == "labels":
            self._mask = _PlaneByPlane(grid, axis, _as_labels, everywhere, look)
        else:
            self._mask = _PlaneByPlane(grid, axis, self._classes, self._nearest, look)
        self._grid, self._axis = grid, axis

    def add(self, outputs_K: NDArray[np.float32]) -> None:
        """Add the next plane [K, …]. Raises ValueError for one of another shape, and for too many."""
        if self._restore == "labels":
            labels = classes_of(outputs_K, self._task, self._kind)
            self._mask.add(labels[np.newaxis].astype(np.float32))
        elif self._restore == self._kind:
            self._mask.add(outputs_K)
        else:
            convert = as_logits if self._restore == "logits" else as_probabilities
            self._mask.add(convert(outputs_K, regions=bool(self._task.regions)))

    def finish(self) -> NDArray[np.uint8]:
        """Return class indices [I, J, K] on the scan's own grid. Every plane must have been added."""
        return self._mask.finish()

    def _classes(self, outputs_K: NDArray[np.float32]) -> NDArray[np.uint8]:
        return classes_of(outputs_K, self._task, "logits" if self._restore == "logits" else "probabilities")


class PercentVolumeRestorer:
    """Restores one map of values in 0..1 as whole percents, plane by plane, by linear interpolation."""

    def __init__(self, grid: VolumeGrid, axis: int = 0) -> None:
        self._map = _PlaneByPlane(grid, axis, _percent, (False, False, False), no_look)

    def add(self, plane: NDArray[np.float32]) -> None:
        """Add the next plane."""
        self._map.add(plane[np.newaxis])

    def finish(self) -> NDArray[np.uint8]:
        """Return the map [I, J, K] on the scan's own grid."""
        return self._map.finish()


def _as_labels(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.asarray(values[0], np.uint8)


def _percent(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.asarray(np.rint(100 * values[0].clip(0, 1)), np.uint8)
