"""Render slices for display: the slices that the network gets, at the scan's own resolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from model_store.preprocessing.geometry import Geometry, geometry_of
from model_store.preprocessing.masks import resample_nearest
from model_store.preprocessing.slices import NativeSlices, stacked, thinned
from model_store.preprocessing.volumes import channels_of
from model_store.scans.types import Scan
from model_store.task import Task

# The darkest and brightest half percent are noise, metal and text burnt into the image.
_PERCENTILES = (0.5, 99.5)
_SAMPLES = 2**18


class DisplaySlices(Sequence[NDArray[np.uint8]]):
    """The slices as uint8 [R, C, 3], rendered on access.

    `geometry.spacing` has the millimetres per row and column, because pixels need not be square.
    """

    def __init__(self, scan: Scan, geometry: Geometry, window: tuple[float, float] | None) -> None:
        self.geometry = geometry
        self._native = NativeSlices(scan.voxels, geometry)
        self._plain = window is None and scan.voxels.dtype == np.uint8 and scan.affine is None
        self._low, self._high = window or _usual_range(scan.voxels)

    def __len__(self) -> int:
        return len(self._native)

    @overload
    def __getitem__(self, index: int) -> NDArray[np.uint8]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[np.uint8]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.uint8] | list[NDArray[np.uint8]]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        plane = self._native[index]
        if not self._plain:
            plane = _eight_bits(plane, self._low, self._high)
        return np.broadcast_to(plane, (*plane.shape[:2], 3))


def display_slices(scan: Scan, task: Task) -> DisplaySlices:
    """Render a scan's slices in the task's plane and window. An 8-bit image without a window is unchanged.

    A task of volumes has its first channel shown, in axial slices.
    """
    if not task.is_volume or not scan.is_volume:
        return DisplaySlices(scan, geometry_of(scan, task), task.normalisation.window)
    first = replace(scan, voxels=channels_of(scan, task)[0][..., np.newaxis])
    return DisplaySlices(first, geometry_of(scan, task), task.channel_list[0].normalisation.window)


def display_image(scan: Scan) -> NDArray[np.uint8]:
    """Render an image without a task, uint8 [H, W, C]: 8 bits are unchanged, others lose the extremes."""
    unchanged: NDArray[np.uint8] = scan.voxels
    return unchanged if unchanged.dtype == np.uint8 else _eight_bits(scan.voxels, *_usual_range(scan.voxels))


def to_slices(labels: NDArray[np.uint8], geometry: Geometry) -> NDArray[np.uint8]:
    """Slice a mask on the scan's own grid into [S, R, C], one slice for each of `display_slices`."""
    if geometry.to_own is None:
        return labels[None]
    if not geometry.resampled:
        return stacked(labels, geometry)
    return resample_nearest(labels, np.array(geometry.to_own), geometry.slices)


def _eight_bits(voxels: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    scaled = (voxels.astype(np.float32) - np.float32(low)) * np.float32(255 / max(high - low, 1e-30))
    rounded: NDArray[np.uint8] = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
    return rounded


def _usual_range(voxels: NDArray[Any]) -> tuple[float, float]:
    # Enough samples for display. Only the choice of sampled voxels depends on the stored axis order.
    low, high = np.percentile(thinned(voxels, _SAMPLES), _PERCENTILES)
    return float(low), float(high)
