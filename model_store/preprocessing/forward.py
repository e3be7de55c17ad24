"""From a scan to the network's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from PIL import Image

from model_store.preprocessing.geometry import Geometry, geometry_of
from model_store.preprocessing.intensity import Scale, match_channels, scale_of
from model_store.preprocessing.slices import NativeSlices
from model_store.scans.types import Scan
from model_store.task import Task


@dataclass(frozen=True)
class Prepared:
    """`slices` float32 [S, C, H, W], the network's input; C counts the neighbours: the channels of slice i-n
    first, those of i+n last. Read-only, and with neighbours a view in which slices share memory.
    """

    slices: NDArray[np.float32]
    geometry: Geometry


def prepare(scan: Scan, task: Task) -> Prepared:
    """Slice, normalise, resize (bilinear) and stack the neighbours.

    Intensities are normalised on the scan's own grid, before resizing: what a scanner stored has one
    distribution, however large the network's input is.

    Raises:
        ScanMismatch: the scan's channels or slices are not those of the task.
        ScanTooLarge: too many slices for the memory that one scan may have.
    """
    geometry = geometry_of(scan, task)
    voxels = match_channels(scan, task)
    native = NativeSlices(voxels, geometry)
    per_volume = task.normalisation.scope == "volume"
    common = scale_of(_volume_parts(voxels, native, geometry), task.normalisation) if per_volume else None
    margin = task.neighbours
    height, width = task.size
    padded = np.empty((len(native) + 2 * margin, task.channels, height, width), np.float32)
    for index in range(len(native)):
        plane = native[index]
        scale = common or _scale_of_slice(plane, native.inside(index), task)
        _resize(scale.apply(plane), padded[margin + index])
    # Both ends repeat their slice: the first slice's lower neighbour is itself.
    padded[:margin] = padded[margin]
    padded[len(padded) - margin :] = padded[len(padded) - margin - 1]
    return Prepared(_with_neighbours(padded, margin), geometry)


def _volume_parts(voxels: NDArray[Any], native: NativeSlices, geometry: Geometry) -> list[NDArray[Any]]:
    """A resampled volume's intensities are those of its own grid: interpolation has none to add."""
    if geometry.resampled:
        return [voxels[:, :, index] for index in range(voxels.shape[2])]
    return list(native)


def _scale_of_slice(plane: NDArray[Any], inside: NDArray[np.bool_] | None, task: Task) -> Scale:
    return scale_of([plane if inside is None else plane[inside]], task.normalisation)


def _resize(plane: NDArray[np.float32], target: NDArray[np.float32]) -> None:
    """[R, C, channels] into `target` [channels, H, W]."""
    height, width = target.shape[1:]
    for channel in range(target.shape[0]):
        values = plane[..., channel]
        if values.shape == (height, width):
            target[channel] = values
        else:
            image = Image.fromarray(np.ascontiguousarray(values), "F")
            target[channel] = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


def _with_neighbours(padded: NDArray[np.float32], margin: int) -> NDArray[np.float32]:
    """[S + 2n, C, H, W] -> [S, (2n + 1)·C, H, W] without a copy: slices lie one after the other in memory."""
    count, channels, height, width = padded.shape
    stride = padded.strides[0]
    return as_strided(
        padded,
        (count - 2 * margin, channels * (2 * margin + 1), height, width),
        (stride, stride // channels, *padded.strides[2:]),
        writeable=False,
    )
