"""What a volume costs, by its header and the task's geometry, before anything is resampled or run.

A few bytes can ask for a great deal: the size of a voxel in a header decides how many voxels and windows the
network's grid has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from model_store.errors import ScanTooLarge
from model_store.preprocessing.grid import VolumeGrid, volume_grid
from model_store.preprocessing.volumes import needs_region
from model_store.preprocessing.windows import window_count
from model_store.scans.types import Limits, Scan
from model_store.task import Task

# A grid of so many voxels, those of 128 windows of 32 x 32 x 16, is prepared in a tenth of a second.
SMALL_GRID = 2**21
# Processor seconds per voxel of the network's grid and channel: measured, 632 x 632 x 632 voxels in 49 s.
_CUBIC_SECONDS = 2e-7
# Per voxel of the scan: of the spline filter with its margin, by channel (26000 x 60 x 60 voxels in
# 9 s), and of filling the holes of a region (500 x 500 x 500 voxels in 11 s).
_FILTER_SECONDS = 5e-8
_REGION_SECONDS = 1e-7
# The same of a lens: 128 x 128 x 128 voxels in 0.12 s.
_LENS_SECONDS = 6e-8
# Passes of the lens over a volume that it is fitted to.
_FITTING = 4
# scipy's spline filter pads each axis by so many voxels at either end.
_SPLINE_MARGIN = 12
# Cubic resampling may take so many times the bytes that a scan may have.
_SPLINE_SHARE = 6


@dataclass(frozen=True)
class Price:
    """What a volume costs.

    Attributes:
        own: voxels of the scan.
        grid: of the network.
        windows: positions of the network's window.
        passes: runs of the network: windows times mirrored passes.
        preparing: processor seconds of the steps of preparing that nothing interrupts.
        plane: pixels of the largest plane, of which preparing and restoring hold a few.
        spline: bytes of nnU-Net's cubic resampling.
    """

    own: int
    grid: VolumeGrid
    windows: int
    passes: int
    preparing: float
    plane: int
    spline: int

    def through_lens(self, task: Task, *, fitted: bool = False) -> Price:
        """The price where a lens sees the whole volume first, and is `fitted` to it: its Fourier transform is
        one step."""
        passes = 1 + (_FITTING if fitted else 0)
        seconds = passes * _LENS_SECONDS * math.prod(self.grid.shape) * task.channel_count
        return replace(self, preparing=self.preparing + seconds)

    def check(self, limits: Limits, task: Task) -> None:
        """Raise ScanTooLarge, with figures, beyond the limits."""
        voxels = math.prod(self.grid.shape)
        sides = " x ".join(map(str, self.grid.shape))
        if voxels > max(limits.max_growth * self.own, SMALL_GRID):
            raise ScanTooLarge(
                f"at the spacing of task '{task.name}' the volume of {self.own} voxels would have {sides}, "
                f"{voxels / self.own:.0f} times as many, and at most {limits.max_growth} times is allowed: "
                "check the spacing in its header, or send a scan with voxels nearer to the task's"
            )
        if self.plane > limits.max_pixels:
            raise ScanTooLarge(
                f"the volume has planes of {self.plane} pixels, and at most {limits.max_pixels} are allowed: "
                "send a part of the volume, or resample it"
            )
        if self.spline > _SPLINE_SHARE * limits.max_decompressed:
            raise ScanTooLarge(
                f"nnU-Net's resampling of the volume takes {self.spline / 2**30:.1f} GiB, and at most "
                f"{_SPLINE_SHARE * limits.max_decompressed / 2**30:.1f} are allowed: send a part of it"
            )
        if self.windows > limits.max_windows:
            raise ScanTooLarge(
                f"the volume would take {self.windows} windows of task '{task.name}' ({sides} voxels), and "
                f"at most {limits.max_windows} are allowed: send a part of the volume, or set "
                "LOCUM_MOST_WINDOWS higher"
            )


def price_of(scan: Scan, task: Task) -> Price:
    """Price a volume for a task of volumes; a crop makes it cheaper, never dearer.

    Raises ScanMismatch for an image, ScanTooLarge where the grid would need too much memory.
    """
    geometry = task.geometry
    assert geometry is not None
    grid = volume_grid(scan, task)
    windows = window_count(grid.shape, geometry.patch, geometry.overlap, geometry.window)
    cubic = geometry.resampling == "nnunet" and not all(axis.same for axis in grid.axes)
    i, j, k = grid.own
    filtered = 0
    if cubic and grid.apart[0] is None:
        filtered = math.prod(axis.count + 2 * _SPLINE_MARGIN for axis in grid.axes)
    resampling = _CUBIC_SECONDS * math.prod(grid.shape) + _FILTER_SECONDS * filtered if cubic else 0.0
    filling = _REGION_SECONDS * math.prod(grid.own) if needs_region(task) else 0.0
    return Price(
        own=math.prod(grid.own),
        grid=grid,
        windows=windows,
        passes=windows << len(geometry.mirror),
        preparing=resampling * task.channel_count + filling,
        plane=max(i * j, i * k, j * k),
        # The padded volume twice: in double precision, and as it is given.
        spline=16 * filtered,
    )
