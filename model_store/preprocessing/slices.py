"""Extract a scan's slices at its own resolution, one at a time, in the order and direction of `geometry`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from model_store.preprocessing.geometry import Geometry
from model_store.preprocessing.resample import sample

# The stored axis of each axis of a turned volume, and whether it is reversed.
Order = tuple[tuple[int, bool], ...]


class NativeSlices(Sequence[NDArray[Any]]):
    """The slices [R, C, channels] of `voxels`, contiguous, in the stored type (float32 if resampled).

    Slices are always contiguous, so that sums over them are bit-identical for every stored axis order.
    """

    def __init__(self, voxels: NDArray[Any], geometry: Geometry) -> None:
        self._geometry = geometry
        if voxels.ndim == 3:
            self._stack = voxels[None]
        elif geometry.resampled:
            self._stack = voxels
            self._fill = float(voxels.min())
        else:
            self._stack = stacked(voxels, geometry)

    def __len__(self) -> int:
        return self._geometry.slices[0]

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        if not 0 <= index < len(self):
            raise IndexError(f"slice {index} of {len(self)}")
        if self._geometry.resampled:
            return self._resampled(index)
        return np.ascontiguousarray(self._stack[index])

    def inside(self, index: int) -> NDArray[np.bool_] | None:
        """Mask [R, C] of the pixels inside the volume; None if all are.

        Pixels outside were never acquired, so they are excluded from intensity statistics.
        """
        if not self._geometry.resampled:
            return None
        _, rows, columns = self._geometry.slices
        to_own = np.array(self._geometry.to_own)
        r, c = np.arange(rows)[:, None], np.arange(columns)[None, :]
        inside = np.ones((rows, columns), bool)
        for axis, side in enumerate(self._geometry.grid):
            s_term, r_term, c_term, offset = to_own[axis]
            position = s_term * index + r_term * r + c_term * c + offset
            inside &= (position >= -0.5) & (position <= side - 0.5)
        return inside

    def _resampled(self, index: int) -> NDArray[np.float32]:
        _, rows, columns = self._geometry.slices
        to_own = np.array(self._geometry.to_own)
        plane = np.empty((rows, columns, self._stack.shape[-1]), np.float32)
        for channel in range(plane.shape[-1]):
            volume, target = self._stack[..., channel], plane[None, ..., channel]
            sample(volume, to_own, target, (index, 0, 0), order=1, outside="nearest")
        inside = self.inside(index)
        assert inside is not None
        plane[~inside] = self._fill
        return plane


def stacked(volume: NDArray[Any], geometry: Geometry) -> NDArray[Any]:
    """View a volume [I, J, K, …] as slices [S, R, C, …] along its stored axes."""
    return turned(volume, geometry.order)


def unstacked(stack: NDArray[Any], geometry: Geometry) -> NDArray[Any]:
    """View slices [S, R, C, …] as the volume [I, J, K, …], the inverse of `stacked`."""
    return turned_back(stack, geometry.order)


def turned(volume: NDArray[Any], order: Order) -> NDArray[Any]:
    """View a volume [I, J, K, …] with its axes in another order and some of them reversed."""
    rest = range(len(order), volume.ndim)
    axes = volume.transpose(*(axis for axis, _ in order), *rest)
    return axes[tuple(slice(None, None, -1 if backwards else None) for _, backwards in order)]


def turned_back(volume: NDArray[Any], order: Order) -> NDArray[Any]:
    """The inverse of `turned`."""
    upright = volume[tuple(slice(None, None, -1 if backwards else None) for _, backwards in order)]
    axes = [axis for axis, _ in order]
    rest = range(len(order), volume.ndim)
    return upright.transpose(*(axes.index(axis) for axis in range(len(order))), *rest)


def thinned(voxels: NDArray[Any], samples: int) -> NDArray[Any]:
    """View about `samples` voxels, evenly spaced along every axis, without a copy."""
    step = max(1, math.ceil((voxels.size / samples) ** (1 / (voxels.ndim - 1))))
    return voxels[(slice(None, None, step),) * (voxels.ndim - 1)]


def network_to_slices(geometry: Geometry) -> NDArray[np.float64]:
    """Return the matrix [4, 4] from the network's index (s, y, x) to a slice's index (s, r, c).

    Resizing maps areas, not pixel centres, onto each other. The half pixels at both ends give the offset.
    """
    _, rows, columns = geometry.slices
    scales = np.array([1.0, rows / geometry.size[0], columns / geometry.size[1]])
    matrix = np.diag([*scales, 1.0])
    matrix[:3, 3] = (scales - 1) / 2
    return matrix
