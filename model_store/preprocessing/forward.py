"""Prepare a scan as the network's input: slice, normalise, resize, stack neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from PIL import Image

from model_store.preprocessing.geometry import Geometry, geometry_of
from model_store.preprocessing.intensity import Scale, match_channels, scale_of
from model_store.preprocessing.slices import NativeSlices
from model_store.scans.types import Scan
from model_store.task import Task

Values = TypeVar("Values", bound=np.generic)


@dataclass(frozen=True)
class Prepared:
    """A network's input and its geometry.

    `slices` is float32 [S, C, H, W]. C includes the neighbours: the channels of slice i-n come first, those
    of i+n last. The array is read-only; with neighbours it is a view in which slices share memory.
    """

    slices: NDArray[np.float32]
    geometry: Geometry


def no_look() -> None:
    """Let the work go on."""


def prepare(scan: Scan, task: Task, look: Callable[[], None] = no_look) -> Prepared:
    """Slice, normalise, resize (bilinear) and stack the neighbours of a scan.

    Intensities are normalised on the scan's own grid, before resizing, so that their distribution does not
    depend on the size of the network's input. `look` is called before each slice; what it raises ends the
    work.

    Raises:
        ScanMismatch: the scan's channels or slices do not fit the task.
        ScanTooLarge: too many slices for the memory allowed for one scan.
    """
    geometry = geometry_of(scan, task)
    voxels = match_channels(scan, task)
    native = NativeSlices(voxels, geometry)
    per_volume = task.normalisation.scope == "volume"
    share = task.normalisation.middle
    common = (
        scale_of(_volume_parts(voxels, native, geometry, share), task.normalisation) if per_volume else None
    )
    margin = task.neighbours
    height, width = task.size
    padded = np.empty((len(native) + 2 * margin, task.channel_count, height, width), np.float32)
    for index in range(len(native)):
        look()
        plane = native[index]
        scale = common or _scale_of_slice(plane, native.inside(index), task)
        _resize(scale.apply(plane), padded[margin + index])
    # The ends repeat: the lower neighbour of the first slice is the slice itself.
    padded[:margin] = padded[margin]
    padded[len(padded) - margin :] = padded[len(padded) - margin - 1]
    return Prepared(_with_neighbours(padded, margin), geometry)


def _volume_parts(
    voxels: NDArray[Any], native: NativeSlices, geometry: Geometry, share: float
) -> Sequence[NDArray[Any]]:
    """Return the voxels for a volume's statistics, without the interpolated ones of a resampled volume."""
    if share != 1:
        return [_middle(native[index], share) for index in range(len(native))]
    if geometry.resampled:
        return [voxels[:, :, index] for index in range(voxels.shape[2])]
    return native


def _scale_of_slice(plane: NDArray[Any], inside: NDArray[np.bool_] | None, task: Task) -> Scale:
    share = task.normalisation.middle
    values = _middle(plane, share) if inside is None else _middle(plane, share)[_middle(inside, share)]
    return scale_of([values] if values.size else [], task.normalisation)


def _middle(plane: NDArray[Values], share: float) -> NDArray[Values]:
    """The central share of each side of a plane [R, C, ...]."""
    if share == 1:
        return plane
    rows, columns = (max(1, round(share * side)) for side in plane.shape[:2])
    top, left = (plane.shape[0] - rows) // 2, (plane.shape[1] - columns) // 2
    return plane[top : top + rows, left : left + columns]


def _resize(plane: NDArray[np.float32], target: NDArray[np.float32]) -> None:
    """Resize [R, C, channels] into `target` [channels, H, W]."""
    height, width = target.shape[1:]
    for channel in range(target.shape[0]):
        values = plane[..., channel]
        if values.shape == (height, width):
            target[channel] = values
        else:
            image = Image.fromarray(np.ascontiguousarray(values), "F")
            target[channel] = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


def _with_neighbours(padded: NDArray[np.float32], margin: int) -> NDArray[np.float32]:
    """View [S + 2n, C, H, W] as [S, (2n + 1)·C, H, W] without a copy: slices are contiguous in memory."""
    if not margin:
        padded.flags.writeable = False
        return padded
    count, channels, height, width = padded.shape
    stride = padded.strides[0]
    return as_strided(
        padded,
        (count - 2 * margin, channels * (2 * margin + 1), height, width),
        (stride, stride // channels, *padded.strides[2:]),
        writeable=False,
    )
