"""Prepare a volume as the network's input: turn, crop, normalise, resample.

The volume is read plane by plane along the axis on which it is stored plane by plane, so besides the result
only a few planes are in memory (but for nnU-Net's cubic resampling, which needs the whole).

Shape suffixes: C channels, X Y Z voxels of the network's grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.errors import ScanMismatch
from model_store.preprocessing.forward import no_look
from model_store.preprocessing.geometry import Geometry, geometry_of
from model_store.preprocessing.grid import VolumeGrid, volume_grid
from model_store.preprocessing.intensity import is_grey
from model_store.preprocessing.lines import Between, across, nearest
from model_store.preprocessing.masks import align, class_map
from model_store.preprocessing.slices import turned
from model_store.preprocessing.volume_intensity import Normaliser, normaliser_of
from model_store.scans.channels import join, split_name
from model_store.scans.types import Scan
from model_store.task import Task


@dataclass(frozen=True)
class PreparedVolume:
    """A network's input [C, X, Y, Z] float32, of which it sees patches, and the grid for the way back.

    `geometry` is that of the scan's axial slices, as a person sees them.
    """

    volume: NDArray[np.float32]
    grid: VolumeGrid
    geometry: Geometry


def join_channels(scans: Mapping[str, Scan], task: Task) -> Scan:
    """Make one scan of the channels that are files of their own, by the names of the task's channels.

    Raises ScanMismatch for a channel that is missing or unknown, and for channels on different grids.
    """
    joined = join(scans)
    _order_of(joined.channel_names, task)
    return joined


def _order_of(given: tuple[str, ...], task: Task) -> list[int]:
    """The place of each of the task's channels among those given, by name or by nnU-Net's number."""
    names = [channel.name for channel in task.channel_list]
    places: dict[int, int] = {}
    unknown = []
    for place, name in enumerate(given):
        found = split_name(name, names)
        if found is None or found[1] in places:
            unknown.append(name)
        else:
            places[found[1]] = place
    expected = f"task '{task.name}' expects the channels {', '.join(names)}"
    if missing := [name for index, name in enumerate(names) if index not in places]:
        raise ScanMismatch(
            f"{expected}, and {', '.join(missing)} is missing (found {', '.join(given)}); send one file for "
            "each, with the channel's name"
        )
    if unknown:
        raise ScanMismatch(f"{expected}; found {', '.join(unknown)} too; leave out what is no channel")
    return [places[index] for index in range(len(names))]


def prepare_volume(scan: Scan, task: Task, look: Callable[[], None] = no_look) -> PreparedVolume:
    """Turn a volume to the network's axes, crop, normalise and resample it, as the task's geometry says.

    `look` is called before each plane, but for nnU-Net's cubic resampling and the region's holes, which are
    one step each; what it raises ends the work.

    Raises:
        ScanMismatch: an image, or another number of channels than the task's.
        ScanTooLarge: too many voxels at the task's spacing.
    """
    geometry = task.geometry
    assert geometry is not None, "a task of slices is prepared by `prepare`"
    channels = channels_of(scan, task)
    grid = volume_grid(scan, task)
    region = None
    if needs_region(task):
        region = turned(_region(channels), grid.order)
        if geometry.crop == "nonzero" and region.any():
            grid = volume_grid(scan, task, _bounds(region))
    inside = None if region is None else region[grid.box]
    volume = np.empty((task.channel_count, *grid.shape), np.float32)
    for index, channel in enumerate(task.channel_list):
        steps = channel.normalisation.ordered_steps
        values, target = turned(channels[index], grid.order)[grid.box], volume[index]
        if geometry.normalise == "before":
            normaliser = normaliser_of(_planes(values, inside, look), values.dtype, steps)
            _resample(values, inside, normaliser, grid, geometry.resampling, target, look)
        else:
            _resample(values, None, Normaliser(()), grid, geometry.resampling, target, look)
            there = None if inside is None else _nearest(inside, grid)
            normaliser = normaliser_of(_planes(target, there, look), target.dtype, steps)
            for place in range(len(target)):
                look()
                own = None if there is None else there[place]
                target[place] = normaliser.apply(target[place], own)
    return PreparedVolume(volume, grid, geometry_of(scan, task))


def needs_region(task: Task) -> bool:
    """Whether a volume of the task is cropped to, or normalised within, what is not zero."""
    return (task.geometry is not None and task.geometry.crop == "nonzero") or any(
        step.within == "region" for each in task.channel_list for step in each.normalisation.ordered_steps
    )


def grid_of(scan: Scan, task: Task) -> VolumeGrid:
    """The grid of `prepare_volume`, without preparing the scan. Raises as it does."""
    geometry = task.geometry
    assert geometry is not None, "a task of slices has a Geometry"
    grid = volume_grid(scan, task)
    if geometry.crop != "nonzero":
        return grid
    # Holes that are filled change no bounds.
    region = turned(_anything(channels_of(scan, task)), grid.order)
    return volume_grid(scan, task, _bounds(region)) if region.any() else grid


def prepare_volume_mask(mask: Scan, task: Task, grid: VolumeGrid) -> NDArray[np.uint8]:
    """Map a mask to class indices [X, Y, Z] on the network's grid, by the nearest voxel.

    `grid` is the scan's. Raises as `prepare_mask`.
    """
    return onto_grid(class_map(align(mask, grid.own, grid.affine, grid.other_affine), task), grid)


def onto_grid(classes: NDArray[np.uint8], grid: VolumeGrid) -> NDArray[np.uint8]:
    """Class indices of a scan's own grid on the network's, by the nearest voxel."""
    return _nearest(turned(classes, grid.order)[grid.box], grid)


def channels_of(scan: Scan, task: Task) -> list[NDArray[Any]]:
    """The voxels [I, J, K] of each of the task's channels, in order.

    Grey that was saved as RGB has three equal channels and is grey.
    """
    voxels, expected = scan.voxels, task.channel_count
    if not scan.is_volume:
        return [voxels]
    if scan.channel_names and expected > 1:
        return [voxels[..., place] for place in _order_of(scan.channel_names, task)]
    if expected == 1 and voxels.shape[-1] == 3 and is_grey(voxels):
        voxels = voxels[..., :1]
    found = voxels.shape[-1]
    if expected == 1 != found:
        raise ScanMismatch(
            f"task '{task.name}' expects one value per voxel, found {found}; send a grey volume"
        )
    if found != expected or (expected > 1 and not task.stacked):
        names = ", ".join(channel.name for channel in task.channel_list)
        how = "a 4-D file with all" if task.stacked else "one file for each"
        raise ScanMismatch(
            f"task '{task.name}' expects {expected} channels ({names}), found one file with {found}; "
            f"send {how}"
        )
    return [voxels[..., index] for index in range(expected)]


def _planes(
    values: NDArray[Any], region: NDArray[np.bool_] | None, look: Callable[[], None]
) -> Callable[[], Iterator[tuple[NDArray[Any], NDArray[np.bool_] | None]]]:
    axis = _stored_by(values)

    def each() -> Iterator[tuple[NDArray[Any], NDArray[np.bool_] | None]]:
        inside = None if region is None else np.moveaxis(region, axis, 0)
        for place, plane in enumerate(np.moveaxis(values, axis, 0)):
            look()
            yield plane, None if inside is None else inside[place]

    return each


def _stored_by(values: NDArray[Any]) -> int:
    """The axis along which the planes lie one after another in memory."""
    return int(np.argmax(np.abs(values.strides)))


def _resample(
    values: NDArray[Any],
    region: NDArray[np.bool_] | None,
    normaliser: Normaliser,
    grid: VolumeGrid,
    rule: str,
    target: NDArray[np.float32],
    look: Callable[[], None],
) -> None:
    """Fill `target` [X, Y, Z] with the normalised values on the network's grid."""
    if rule == "nnunet":
        target[...] = _cubic(normaliser.apply(values, region), grid, look)
        return
    places = [axis.in_scan() for axis in grid.axes]
    first = _stored_by(values)
    planes, regions = (
        np.moveaxis(values, first, 0),
        None if region is None else np.moveaxis(region, first, 0),
    )
    rest = [own for axis, own in enumerate(places) if axis != first]

    def plane_at(index: int) -> NDArray[np.float32]:
        look()
        own = None if regions is None else regions[index]
        return across(normaliser.apply(planes[index], own), rest)

    between, filled = Between(plane_at), np.moveaxis(target, first, 0)
    for index, place in enumerate(places[first]):
        filled[index] = between(float(place))


def _cubic(values: NDArray[np.float32], grid: VolumeGrid, look: Callable[[], None]) -> NDArray[np.float32]:
    """nnU-Net's resampling of scans: cubic splines, with the nearest plane along an axis of thick slices.

    scipy's zoom stands for skimage's resize, with which it agrees to rounding; like it, the values stay
    within those of what is resized.
    """
    if all(axis.same for axis in grid.axes):
        return values
    apart = grid.apart[0]
    if apart is None:
        return _splined(values, grid.shape)
    planes = np.moveaxis(values, apart, 0)
    sides = [axis.side for index, axis in enumerate(grid.axes) if index != apart]
    chosen = nearest(grid.axes[apart].in_scan())
    done = {}
    for index in np.unique(chosen):
        look()
        done[int(index)] = _splined(planes[index], tuple(sides))
    return np.moveaxis(np.stack([done[int(index)] for index in chosen]), 0, apart)


def _splined(values: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    # Half a second, which only models of nnU-Net need.
    from scipy import ndimage

    if values.shape == shape:
        return values
    factors = [new / old for new, old in zip(shape, values.shape, strict=True)]
    found: NDArray[np.float32] = ndimage.zoom(values, factors, order=3, mode="nearest", grid_mode=True)
    return np.clip(found, values.min(), values.max(), out=found)


def _nearest(values: NDArray[Any], grid: VolumeGrid) -> NDArray[Any]:
    return np.ascontiguousarray(values[np.ix_(*(nearest(axis.in_scan()) for axis in grid.axes))])


def _region(channels: list[NDArray[Any]]) -> NDArray[np.bool_]:
    """Where any channel is not zero, with holes filled, as nnU-Net's `create_nonzero_mask`."""
    from scipy import ndimage

    return np.asarray(ndimage.binary_fill_holes(_anything(channels)), bool)


def _anything(channels: list[NDArray[Any]]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = channels[0] != 0
    for other in channels[1:]:
        found |= other != 0
    return found


def _bounds(region: NDArray[np.bool_]) -> tuple[slice, ...]:
    bounds = []
    for axis in range(region.ndim):
        there = np.flatnonzero(region.any(axis=tuple(each for each in range(region.ndim) if each != axis)))
        bounds.append(slice(int(there[0]), int(there[-1]) + 1))
    return tuple(bounds)
