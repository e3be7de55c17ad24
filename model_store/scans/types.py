"""A scan in memory, and what one may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model_store.errors import DamagedScan, ScanTooLarge

# A side below this is no picture of an organ; it is a damaged header, an icon or a trap.
MIN_SIDE = 8

# Far beyond any intensity, far below where squares overflow float32's exponent when a network sums them.
MAX_INTENSITY = 1e15


@dataclass(frozen=True)
class Limits:
    """What a scan may cost, checked before anything of that size is allocated.

    `max_bytes` of the file as it is sent, `max_pixels` of an image (width x height), `max_voxels` of a volume
    and `max_decompressed` bytes after inflating.
    """

    max_bytes: int = 512 * 2**20
    max_pixels: int = 4096 * 4096
    max_voxels: int = 512**3
    max_decompressed: int = 2**30


@dataclass(frozen=True)
class Scan:
    """A decoded scan.

    Attributes:
        voxels: image [H, W, C] or volume [I, J, K, C] in the file's own grid and order, in any integer or
            float type, intensities as the file means them (scl_slope applied). Finite. Read-only.
        affine: [4, 4] float64, voxel index -> RAS in the file's units (mm unless `mm_per_unit` says
            otherwise); None for an image.
        format: what the bytes were.
        mm_per_unit: millimetres per unit of the affine, by the header's xyzt_units.
        notes: what a person should know about how the file was read, a sentence each.
    """

    voxels: NDArray[Any]
    affine: NDArray[np.float64] | None
    format: Literal["png", "tiff", "nifti"]
    mm_per_unit: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def is_volume(self) -> bool:
        """Whether the scan has a position in the patient and can be sliced."""
        return self.voxels.ndim == 4

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return int(self.voxels.shape[-1])

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of a mask of this scan: [H, W] or [I, J, K]."""
        return tuple(map(int, self.voxels.shape[:-1]))

    @property
    def voxel_volume_ml(self) -> float | None:
        """Millilitres per voxel; None for an image, which knows no spacing."""
        if self.affine is None:
            return None
        return float(abs(np.linalg.det(self.affine[:3, :3]))) * self.mm_per_unit**3 / 1000


def check_sides(width: int, height: int, limits: Limits, name: str) -> None:
    """Refuse an image too small to mean anything or too large to read."""
    if min(width, height) < MIN_SIDE:
        raise DamagedScan(
            f"{name}: expected at least {MIN_SIDE} pixels a side, found {width} x {height}; send the original"
        )
    if width * height > limits.max_pixels:
        raise ScanTooLarge(
            f"{name}: expected at most {limits.max_pixels} pixels, found {width} x {height}; "
            "crop it or send a smaller version"
        )


def check_finite(voxels: NDArray[Any], name: str) -> None:
    """Refuse NaN, infinity and absurd intensities. Minimum and maximum carry a NaN and need no temporary."""
    if voxels.dtype.kind != "f":
        return
    low, high = float(voxels.min()), float(voxels.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise DamagedScan(
            f"{name}: expected finite intensities, found NaN or infinity; "
            "replace them (background is often stored so) and send the scan again"
        )
    if max(-low, high) > MAX_INTENSITY:
        raise DamagedScan(
            f"{name}: expected intensities within ±{MAX_INTENSITY:g}, found {low:g} to {high:g}; "
            "the byte order or the scaling of the file is probably wrong"
        )
