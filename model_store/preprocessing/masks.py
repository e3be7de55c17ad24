"""Convert masks to class indices, and check their values and grid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from model_store.errors import MaskMismatch, TaskError
from model_store.preprocessing.geometry import Geometry
from model_store.preprocessing.intensity import is_grey
from model_store.preprocessing.resample import sample
from model_store.preprocessing.segments import by_labels
from model_store.preprocessing.slices import network_to_slices, stacked
from model_store.scans.types import Scan, largest_shift
from model_store.task import Task

_WHOLE = 1e-3
# Share of the gap between planes by which a plane of a SEG may be off its scan's.
_OFF_PLANE = 0.2


def class_map(mask: Scan, task: Task) -> NDArray[np.uint8]:
    """Map a mask to class indices on its own grid, [H, W] or [I, J, K]; IGNORED where it has no truth.

    Raises TaskError naming the values, or segments, that are not in the task, MaskMismatch for a mask in
    colour.
    """
    values = _label_voxels(by_labels(mask, task)[0])
    table = task.lookup()
    if int(values.min()) >= 0 and int(values.max()) < len(table):
        classes = table[values]
        if int(classes.min()) >= 0:
            return np.asarray(classes, np.uint8)
    check_values(np.unique(values).tolist(), task)
    raise AssertionError("a value has no class, and yet all are the task's")


def label_values(mask: Scan, most: int = 256) -> list[int]:
    """List the label values in a mask, ascending.

    Raises MaskMismatch for colours or more than `most` values, and TaskError for fractions.
    """
    found = np.unique(_label_voxels(mask))
    if len(found) > most:
        raise MaskMismatch(
            f"expected a mask, found a picture with {len(found)} values; a mask holds a few label values"
        )
    return [int(value) for value in found]


def check_values(values: Iterable[int], task: Task) -> None:
    """Raise TaskError naming the values of a mask that are not in the task."""
    allowed = sorted((*task.mask_values, *task.ignore))
    outside = [value for value in values if value not in allowed]
    if outside:
        more = f", … ({len(outside)} in all)" if len(outside) > 8 else ""
        raise TaskError(
            f"the mask has values that task '{task.name}' does not name: "
            f"{', '.join(map(str, outside[:8]))}{more}; expected {allowed}. "
            "Correct the mask; before training, a label, background or ignore in task.yaml may take the "
            "values too"
        )


def prepare_mask(mask: Scan, task: Task, geometry: Geometry) -> NDArray[np.uint8]:
    """Map a mask to class indices [S, H, W] of the slices that `prepare` makes, by nearest neighbour.

    `geometry` is the scan's. Raises MaskMismatch if the mask is not on the scan's grid, and TaskError as
    `class_map` does.
    """
    classes = class_map(align(mask, geometry.grid, geometry.affine, geometry.other_affine), task)
    return onto_slices(classes, geometry)


def classes_on(scan: Scan, mask: Scan, task: Task) -> NDArray[np.uint8]:
    """Map a mask to class indices on the grid of its scan, [H, W] or [I, J, K]. Raises as `prepare_mask`."""
    return class_map(align(mask, scan.grid, scan.affine, scan.other_affine), task)


def onto_slices(classes: NDArray[np.uint8], geometry: Geometry) -> NDArray[np.uint8]:
    """Class indices of a scan's own grid as [S, H, W] of the slices that `prepare` makes, by the nearest."""
    if classes.ndim == 2:
        return _resized(classes[None], geometry.size)
    if not geometry.resampled:
        return _resized(stacked(classes, geometry), geometry.size)
    to_own = np.array(geometry.to_own) @ network_to_slices(geometry)
    return resample_nearest(classes, to_own, (geometry.slices[0], *geometry.size))


def resample_nearest(
    classes: NDArray[np.uint8], to_own: NDArray[np.float64], shape: tuple[int, int, int]
) -> NDArray[np.uint8]:
    """Resample classes onto a grid of `shape`, which `to_own` maps to their grid. Background outside."""
    sampled = np.empty(shape, np.uint8)
    sample(classes, to_own, sampled, order=0, outside="zero")
    return sampled


def _resized(stack: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    if stack.shape[1:] == size:
        return np.ascontiguousarray(stack)
    resized = np.empty((len(stack), *size), np.uint8)
    for index, plane in enumerate(stack):
        image = Image.fromarray(np.ascontiguousarray(plane), "L")
        resized[index] = np.asarray(image.resize(size[::-1], Image.Resampling.NEAREST))
    return resized


def align(
    mask: Scan, grid: tuple[int, ...], affine: ArrayLike | None, other: ArrayLike | None = None
) -> Scan:
    """Bring a mask onto the grid of its scan, by turning axes over alone.

    Converters of DICOM differ in the order and direction of axes. A DICOM SEG may also leave out empty
    planes. `other` is the scan's `other_affine`. Raises MaskMismatch for a mask on another grid.
    """
    if mask.affine is not None and affine is not None and mask.voxels.ndim == 4:
        between = np.linalg.inv(np.array(affine)) @ mask.affine
        turn = nib.orientations.io_orientation(between)
        if not np.isnan(turn).any() and not np.array_equal(turn, [[0, 1], [1, 1], [2, 1]]):
            moved = nib.orientations.apply_orientation(mask.voxels, turn)
            back = nib.orientations.inv_ornt_aff(turn, mask.grid)
            mask = replace(mask, voxels=moved, affine=mask.affine @ back, forms=None)
        if mask.format == "dicom-seg" and mask.grid != grid:
            mask = _filled(mask, grid, np.array(affine))
    check_grid(mask, grid, affine, other)
    return mask


def _filled(mask: Scan, grid: tuple[int, ...], affine: NDArray[np.float64]) -> Scan:
    """Add the planes that a SEG leaves out; unchanged where it is no part of the grid."""
    assert mask.affine is not None
    # Plane by plane: where no two planes are adjacent, the mask's own gap is several of the scan's.
    count = mask.grid[2]
    origins = mask.affine @ np.stack([np.zeros(count), np.zeros(count), np.arange(count), np.ones(count)])
    starts = (np.linalg.inv(affine) @ origins)[:3]
    x, y, planes = np.rint(starts).astype(int)
    if (
        np.abs(starts[2] - planes).max() > _OFF_PLANE
        or (np.diff(planes) < 1).any()
        or (x != x[0]).any()
        or (y != y[0]).any()
        or min(x[0], y[0], planes[0]) < 0
        or x[0] + mask.grid[0] > grid[0]
        or y[0] + mask.grid[1] > grid[1]
        or planes[-1] >= grid[2]
    ):
        return mask
    whole = np.zeros((*grid, 1), mask.voxels.dtype)
    whole[x[0] : x[0] + mask.grid[0], y[0] : y[0] + mask.grid[1], planes] = mask.voxels
    own = mask.affine.copy()
    own[:, 2] = affine[:, 2]
    own[:, 3] = own @ np.array([-x[0], -y[0], -planes[0], 1.0])
    return replace(mask, voxels=whole, affine=own)


def check_grid(
    mask: Scan, grid: tuple[int, ...], affine: ArrayLike | None, other: ArrayLike | None = None
) -> None:
    """Raise MaskMismatch unless the mask is on this grid, that of its scan.

    `other` is the form of a NIfTI with two by which the scan is not read: a mask that is on it has the
    right voxels and a header that says otherwise.
    """
    if mask.grid != grid:
        raise MaskMismatch(
            f"the mask has {' x '.join(map(str, mask.grid))} voxels, its scan "
            f"{' x '.join(map(str, grid))}; draw the mask on the scan's own grid"
        )
    if mask.affine is None or affine is None:
        return
    own = np.array(affine)
    shift = largest_shift(mask.affine, own, mask.grid)
    # Programs round affines when they save; from half a voxel on, a label would belong to the neighbour.
    near = 0.5 * float(np.linalg.norm(own[:3, :3], axis=0).min())
    if shift > near:
        pairs = ((mask.affine, other, "the scan's qform"), (mask.other_affine, own, "its own qform"))
        for found, place, form in pairs:
            if found is None or place is None or largest_shift(found, np.array(place), mask.grid) > near:
                continue
            raise MaskMismatch(
                f"the mask lies on its scan by {form}, and Locum reads both by their sforms, which are "
                f"{shift * mask.mm_per_unit:.3g} mm apart: its labels are in the right voxels, so do not "
                "resample it; save it with the scan's own header (both forms and their codes)"
            )
        raise MaskMismatch(
            f"the mask is up to {shift:.3g} mm away from its scan (their affines differ); "
            "resample the mask onto the scan's grid"
        )


def _label_voxels(mask: Scan) -> NDArray[Any]:
    """Return the mask's channel as integers. Scaled masks (scl_slope) have floats close to integers."""
    if not is_grey(mask.voxels):
        raise MaskMismatch(
            "expected a mask with one channel of label values, found colours; save the label values "
            "themselves as grey"
        )
    values = mask.voxels[..., 0]
    if values.dtype.kind in "iu":
        return values
    rounded = np.round(values)
    odd = values[np.abs(values - rounded) > _WHOLE]
    if odd.size:
        shown = np.unique(odd)[:8]
        raise TaskError(
            f"the mask has values that are not whole numbers ({', '.join(f'{v:g}' for v in shown)}); "
            "a mask holds label values, without interpolation"
        )
    return rounded.astype(np.int64)
