"""Geometry of slices: the mapping between a scan's own grid and the slices that a network gets.

Slices always have the same orientation, for every order and direction of the file's stored axes:

    plane      slices run to    rows run to     columns run to
    axial      superior         posterior       the patient's left
    coronal    posterior        inferior        the patient's left
    sagittal   left             inferior        posterior

This is the radiological convention (the patient's right is on the left of the image).

Acquisitions are tilted on purpose (along the AC-PC line, a vertebra, the heart's axis), and the networks were
trained on slices as acquired. So a tilt of up to `OBLIQUE_DEGREES` keeps the stored planes, which needs no
interpolation. With a larger tilt the nearest stored plane is not the plane of the task, so the volume is
resampled onto a grid along the patient's axes that covers the whole volume. In both cases the mask is
returned on the file's own grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from model_store.errors import ScanMismatch, ScanTooLarge
from model_store.scans.types import MIN_SIDE, Scan
from model_store.task import Plane, Task

OBLIQUE_DEGREES = 15.0

# Slices, rows and columns, each with the direction in which its index grows.
_DIRECTIONS: dict[Plane, tuple[str, str, str]] = {
    "axial": ("S", "P", "L"),
    "coronal": ("P", "I", "L"),
    "sagittal": ("L", "I", "P"),
}

# 1 GiB of float32 each for the network's input, for a resampled oblique volume and, when a mask is made, for
# its probabilities. Without the limit, a header could declare a thin rod of a million slices, each of which
# would be enlarged to the network's size.
MOST_ELEMENTS = 2**28

# nibabel has no type annotations.
_orientations: Any = nib.orientations

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Geometry:
    """The mapping from slices back to the scan's own grid.

    Attributes:
        grid: the scan's own shape, [H, W] or [I, J, K].
        slices: (S, R, C), number, rows and columns of the slices at the scan's own resolution.
        size: (H, W) of the network's input.
        to_own: [4, 4], slice index (s, r, c) -> index in the scan's own grid. None for an image.
        resampled: whether the slices are resampled, not along the stored axes.
        spacing: (s, r, c) in mm, None for an image and for a film.
        tilt_degrees: largest angle between a stored axis and the patient's axis nearest to it.
        affine: the scan's own, None for an image.
        other_affine: that of the other form of a NIfTI that has two.
    """

    grid: tuple[int, ...]
    slices: tuple[int, int, int]
    size: tuple[int, int]
    to_own: Matrix | None = None
    resampled: bool = False
    spacing: tuple[float, float, float] | None = None
    tilt_degrees: float = 0.0
    affine: Matrix | None = None
    other_affine: Matrix | None = None

    @property
    def order(self) -> tuple[tuple[int, bool], ...]:
        """For slices along stored axes: the stored axis of each of (s, r, c), and whether it is reversed."""
        columns = np.array(self.to_own)[:3, :3].T
        axes = [int(np.abs(column).argmax()) for column in columns]
        return tuple((axis, bool(column[axis] < 0)) for axis, column in zip(axes, columns, strict=True))


def geometry_of(scan: Scan, task: Task) -> Geometry:
    """Compute the geometry of a scan's slices in the task's plane.

    A task of volumes has axial slices for display and for the guard; their `size` is their own, as is that of
    a task that has none yet.

    Raises ScanMismatch if the slices have too few rows or columns, ScanTooLarge if there are too many slices.
    """
    keeps_size = task.is_volume or not task.is_sized
    if scan.film and (task.is_volume or task.plane != "axial"):
        what = "volumes" if task.is_volume else f"{task.plane} slices"
        raise ScanMismatch(
            f"task '{task.name}' is of {what}, and the scan is a film: images one after the other in time; "
            "send a volume, or ask a model of images"
        )
    if scan.affine is None:
        rows, columns = scan.grid
        return Geometry(scan.grid, (1, rows, columns), (rows, columns) if keeps_size else task.size)
    grid, affine = np.array(scan.grid), scan.affine
    directions = _DIRECTIONS[task.plane]
    wanted = _orientations.axcodes2ornt(directions)
    stored = _orientations.io_orientation(affine)
    tilt = tilt_of(affine, stored)
    if tilt <= OBLIQUE_DEGREES:
        transform = _orientations.ornt_transform(stored, wanted)
        shape = np.empty(3, np.int64)
        shape[transform[:, 0].astype(int)] = grid
        to_own = _orientations.inv_ornt_aff(transform, scan.grid)
    else:
        shape, to_own = _covering_grid(affine, grid, stored, wanted)
    in_mm = affine[:3, :3] @ to_own[:3, :3] * scan.mm_per_unit
    spacing = np.linalg.norm(in_mm, axis=0)
    geometry = Geometry(
        grid=scan.grid,
        slices=(int(shape[0]), int(shape[1]), int(shape[2])),
        size=(int(shape[1]), int(shape[2])) if keeps_size else task.size,
        to_own=frozen(to_own),
        resampled=tilt > OBLIQUE_DEGREES,
        spacing=None if scan.film else (float(spacing[0]), float(spacing[1]), float(spacing[2])),
        tilt_degrees=tilt,
        affine=frozen(affine),
        other_affine=None if scan.other_affine is None else frozen(scan.other_affine),
    )
    if not task.is_volume:
        _check(geometry, task)
    return geometry


def tilt_of(affine: NDArray[np.float64], stored: NDArray[np.float64]) -> float:
    """Compute the largest angle, in degrees, between a stored axis and its assigned patient axis."""
    directions = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    cosines = [abs(directions[int(world), axis]) for axis, (world, _) in enumerate(stored)]
    return math.degrees(math.acos(min(1.0, *cosines)))


def _covering_grid(
    affine: NDArray[np.float64],
    grid: NDArray[np.int64],
    stored: NDArray[np.float64],
    wanted: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Make a grid along the patient's axes that covers the volume, at its voxel sizes: (shape, to_own)."""
    sizes = np.linalg.norm(affine[:3, :3], axis=0)
    along_world = np.empty(3)
    along_world[stored[:, 0].astype(int)] = sizes
    corners = np.array(np.meshgrid(*[(-0.5, side - 0.5) for side in grid])).reshape(3, -1)
    world = affine[:3, :3] @ corners + affine[:3, 3:]
    low, high = world.min(axis=1), world.max(axis=1)
    to_world = np.zeros((4, 4))
    to_world[3, 3] = 1
    shape = np.empty(3, np.int64)
    to_world[:3, 3] = (low + high) / 2
    for axis, (direction, sign) in enumerate(wanted):
        step = along_world[int(direction)]
        extent = float(high[int(direction)] - low[int(direction)])
        shape[axis] = max(1, math.ceil(extent / step - 1e-6))
        to_world[int(direction), axis] = sign * step
    to_world[:3, 3] -= to_world[:3, :3] @ ((shape - 1) / 2)
    return shape, np.linalg.inv(affine) @ to_world


def _check(geometry: Geometry, task: Task) -> None:
    count, rows, columns = geometry.slices
    if min(rows, columns) < MIN_SIDE:
        raise ScanMismatch(
            f"task '{task.name}' uses {task.plane} slices, which in this scan have {rows} x {columns} "
            f"voxels (expected at least {MIN_SIDE} per side); send a volume, or an image of that plane"
        )
    height, width = geometry.size
    elements = (count + 2 * task.neighbours) * task.channel_count * height * width
    if geometry.resampled:
        elements = max(elements, count * rows * columns)
    if elements > MOST_ELEMENTS:
        raise ScanTooLarge(
            f"{count} {task.plane} slices of {rows} x {columns} voxels are too many at once for task "
            f"'{task.name}'; send a part of the volume"
        )


def frozen(matrix: NDArray[np.float64]) -> Matrix:
    """A matrix as tuples, which an immutable geometry can hold."""
    return tuple(tuple(float(value) for value in row) for row in matrix)
