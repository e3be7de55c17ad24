"""The grid on which a network sees a volume, and how its voxels lie on the scan's own.

A network's axes are the scan's stored axes, in another order and some of them turned over, with another
spacing. Nothing is turned by an angle: a tilted acquisition stays as it was acquired. So every step between
the two grids is done axis by axis:

    place on the scan's axis = step · place on the network's axis + offset
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from model_store.errors import ScanMismatch, ScanTooLarge
from model_store.preprocessing.geometry import MOST_ELEMENTS, Matrix, frozen, tilt_of
from model_store.preprocessing.slices import Order
from model_store.scans.types import Scan
from model_store.task import Task
from model_store.volume import VolumeGeometry

_orientations: Any = nib.orientations

Triple = tuple[int, int, int]

# Voxels of the network along an axis, voxels of the scan per such voxel, and the place of the first.
Step = tuple[int, float, float]

# MONAI's: a voxel this near to the wanted spacing is left as it is; how near a corner has to be to be the
# first.
_SAME_MM, _AT_FIRST = 1e-3, 1e-8
# nnU-Net resamples the axis of thick slices apart from the others when they are so many times thicker.
_ANISOTROPIC = 3


@dataclass(frozen=True)
class Axis:
    """One axis of the network's grid.

    Attributes:
        stored: the scan's axis that it runs along, and whether it runs against it.
        low: first of the scan's voxels along it, counted in its direction; of a cropped volume not 0.
        count: the scan's voxels along it.
        side: the network's voxels along it.
        step: the scan's voxels per voxel of the network.
        offset: the place of the network's first voxel, in the scan's voxels after `low`.
        spacing: millimetres per voxel of the scan.
    """

    stored: tuple[int, bool]
    low: int
    count: int
    side: int
    step: float
    offset: float
    spacing: float

    @property
    def same(self) -> bool:
        """Whether the network's voxels are the scan's."""
        return self.side == self.count and self.step == 1

    def in_scan(self) -> NDArray[np.float64]:
        """Places of the network's voxels in the scan's voxels, within the scan."""
        return np.clip(np.arange(self.side) * self.step + self.offset, 0, self.count - 1)

    def in_network(self) -> NDArray[np.float64]:
        """Places of the scan's voxels in the network's voxels, within the network's grid."""
        return np.clip((np.arange(self.count) - self.offset) / self.step, 0, self.side - 1)


@dataclass(frozen=True)
class VolumeGrid:
    """The network's grid on a scan.

    Attributes:
        own: the scan's own shape, [I, J, K].
        axes: the network's three axes.
        affine, other_affine: the scan's, as of `Geometry`.
        tilt_degrees: largest angle between a stored axis and the patient's axis nearest to it.
        apart: by nnU-Net's rule, the axis of thick slices on the way to the network and on the way back,
            along which the nearest plane is taken; None elsewhere.
    """

    own: Triple
    axes: tuple[Axis, Axis, Axis]
    affine: Matrix
    other_affine: Matrix | None = None
    tilt_degrees: float = 0.0
    apart: tuple[int | None, int | None] = (None, None)

    @classmethod
    def of_network(cls, shape: Sequence[int], spacing: Sequence[float]) -> VolumeGrid:
        """The grid of a volume that is known on the network's voxels alone."""
        x, y, z = (
            Axis((index, False), 0, side, side, 1.0, 0.0, length)
            for index, (side, length) in enumerate(zip(shape, spacing, strict=True))
        )
        return cls((x.side, y.side, z.side), (x, y, z), frozen(np.diag([*spacing, 1.0])))

    @property
    def shape(self) -> Triple:
        """Sides of the network's grid."""
        x, y, z = (axis.side for axis in self.axes)
        return x, y, z

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Millimetres per voxel of the network's grid."""
        x, y, z = (axis.step * axis.spacing for axis in self.axes)
        return x, y, z

    @property
    def order(self) -> Order:
        """The stored axis of each of the network's, and whether it is reversed."""
        return tuple(axis.stored for axis in self.axes)

    @property
    def box(self) -> tuple[slice, slice, slice]:
        """The part of the turned scan that the network sees."""
        x, y, z = (slice(axis.low, axis.low + axis.count) for axis in self.axes)
        return x, y, z


def volume_grid(scan: Scan, task: Task, box: tuple[slice, ...] | None = None) -> VolumeGrid:
    """Compute the network's grid on a scan, or on a `box` of it, in the network's axes.

    Raises ScanMismatch for an image, ScanTooLarge where the grid would need too much memory.
    """
    geometry = task.geometry
    assert geometry is not None, "a task of slices has a Geometry"
    if scan.affine is None or scan.film:
        raise ScanMismatch(
            f"task '{task.name}' segments volumes, and the scan is an image or a film without a position in "
            "the patient; send a volume: NIfTI, or a DICOM series"
        )
    order = volume_order(scan, geometry)
    # Where each of the network's axes leads per voxel of the scan.
    columns = np.stack(
        [(-1 if turned else 1) * scan.affine[:3, axis] * scan.mm_per_unit for axis, turned in order], axis=1
    )
    sides = [scan.grid[axis] for axis, _ in order]
    lows = [0, 0, 0] if box is None else [each.start for each in box]
    counts = sides if box is None else [each.stop - each.start for each in box]
    if geometry.spacing is not None and geometry.resampling == "monai":
        steps = _monais(columns, counts, geometry.spacing)
    else:
        steps = _of_the_area(columns, counts, geometry.spacing)
    axes = [
        Axis(stored, low, count, side, step, offset, float(np.linalg.norm(column)))
        for stored, low, count, (side, step, offset), column in zip(
            order, lows, counts, steps, columns.T, strict=True
        )
    ]
    i, j, k = scan.grid
    x, y, z = axes
    apart: tuple[int | None, int | None] = (None, None)
    if geometry.resampling == "nnunet" and geometry.spacing is not None:
        there = [axis.spacing for axis in axes]
        here = [mm or own for own, mm in zip(there, geometry.spacing, strict=True)]
        apart = _thick(there, here), _thick(here, there)
    stored_ornt = _orientations.io_orientation(scan.affine)
    grid = VolumeGrid(
        own=(i, j, k),
        axes=(x, y, z),
        affine=frozen(scan.affine),
        other_affine=None if scan.other_affine is None else frozen(scan.other_affine),
        tilt_degrees=tilt_of(scan.affine, stored_ornt),
        apart=apart,
    )
    padded = [max(side, own) for side, own in zip(grid.shape, geometry.patch, strict=True)]
    if math.prod(padded) * task.channel_count > MOST_ELEMENTS:
        raise ScanTooLarge(
            f"at {_in_words(geometry)} the volume has {' x '.join(map(str, grid.shape))} voxels in "
            f"{task.channel_count} channel(s), more than the {MOST_ELEMENTS} that may be at once for task "
            f"'{task.name}'; send a part of the volume"
        )
    return grid


def volume_order(scan: Scan, geometry: VolumeGeometry) -> Order:
    """The stored axis of each of the network's axes, and whether it is reversed."""
    if geometry.axes.islower():
        return tuple(("ijk".index(axis), False) for axis in geometry.axes)
    stored = _orientations.io_orientation(scan.affine)
    turn = _orientations.ornt_transform(stored, _orientations.axcodes2ornt(geometry.axes))
    found = {int(to): (axis, bool(sign < 0)) for axis, (to, sign) in enumerate(turn)}
    return tuple(found[index] for index in range(3))


def _of_the_area(
    columns: NDArray[np.float64], counts: Sequence[int], spacing: Sequence[float | None] | None
) -> list[Step]:
    """By axis the voxels, step and offset of a grid over the same area; the scan's own where it is None.

    `columns` [3, 3] has where each axis leads per voxel, in mm, and `counts` the scan's voxels.
    """
    found = []
    for count, mm, wanted in zip(
        counts, np.linalg.norm(columns, axis=0), spacing or (None,) * 3, strict=True
    ):
        side = count if wanted is None else max(1, round(count * float(mm) / wanted))
        step = count / side
        found.append((side, step, (step - 1) / 2))
    return found


def _monais(
    columns: NDArray[np.float64], counts: Sequence[int], spacing: Sequence[float | None]
) -> list[Step]:
    """The same of MONAI's Spacing (`zoom_affine`, `compute_shape_offset`), on which a bundle was trained.

    Its grid begins at the centre of the scan's first voxel, where that is the first corner of the scan on the
    new axes to 1e-8 of a voxel. On most oblique affines it is not, since a header's float32 leave a shear of
    1e-7: then both grids have one centre. A shear beyond that is not undone here.
    """
    mm = np.linalg.norm(columns, axis=0)
    asked = np.array([own if each is None else each for own, each in zip(mm, spacing, strict=True)])
    wanted = np.where(np.abs(mm - asked) <= _SAME_MM, mm, asked)
    upper = np.linalg.cholesky(columns.T @ columns).T
    zoomed = columns @ np.linalg.inv(upper) @ np.diag(np.sign(np.diag(upper)) * wanted)
    corners = np.array(np.meshgrid(*[(0.0, count - 1.0) for count in counts], indexing="ij")).reshape(3, -1)
    there = np.linalg.solve(zoomed, columns) @ corners
    sides = np.round(np.ptp(there, axis=1) + 1)
    from_first = any(
        np.allclose((there - corner[:, None]).min(axis=1), 0, atol=_AT_FIRST) for corner in there.T
    )
    steps = wanted / mm
    offsets = np.zeros(3) if from_first else (np.array(counts) - sides * steps) / 2
    return [
        (max(1, int(side)), float(step), float(offset))
        for side, step, offset in zip(sides, steps, offsets, strict=True)
    ]


def _thick(spacing: list[float], other: list[float]) -> int | None:
    """The axis of thick slices, by nnU-Net's `determine_do_sep_z_and_axis`."""
    for each in (spacing, other):
        if max(each) / min(each) > _ANISOTROPIC:
            thick = [axis for axis, mm in enumerate(each) if mm == max(each)]
            return thick[0] if len(thick) == 1 else None
    return None


def _in_words(geometry: VolumeGeometry) -> str:
    if geometry.spacing is None:
        return "its own spacing"
    sides = ("its own" if mm is None else f"{mm:g}" for mm in geometry.spacing)
    return f"a spacing of {' x '.join(sides)} mm"
