"""Scans of phantom abdomens at four simulated hospitals, with their true masks.

No patient's data is in them. The module needs numpy, scipy and nibabel alone: the demo runs without torch.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from locum.demo.body import LESION, LIVER, SHAPE, VOXEL_MM, Field, draw_body, smooth


@dataclass(frozen=True)
class Scanner:
    """How a hospital's scanner shows brightness within [0, 1].

    `curve` is the exponent of its contrast, `shading` the amplitude of its bias field, `blur_mm` the standard
    deviation of its point spread, `noise` a standard deviation as a share of full brightness. `gain` and
    `offset` map to raw intensities. `inverted` scanners show bright tissue dark.
    """

    curve: float
    shading: float
    blur_mm: float
    noise: float
    gain: float
    offset: float = 0.0
    inverted: bool = False


# Values of the mask, by what they are parts of: the lesion is a part of the liver.
REGIONS = {"liver": (LIVER, LESION), "lesion": (LESION,)}
MEMBERS = ("aster", "birch", "cedar")
OUTSIDE = "heath"
# The members differ as three good scanners do. Heath's export is a negative, of a noisy and shaded scanner.
SCANNERS = {
    "aster": Scanner(curve=1.0, shading=0.06, blur_mm=0.8, noise=0.018, gain=1000),
    "birch": Scanner(curve=0.75, shading=0.18, blur_mm=1.6, noise=0.026, gain=380, offset=20),
    "cedar": Scanner(curve=1.4, shading=0.12, blur_mm=0.6, noise=0.036, gain=2600, offset=-300),
    OUTSIDE: Scanner(curve=0.6, shading=0.20, blur_mm=1.3, noise=0.045, gain=240, offset=60, inverted=True),
}


@dataclass(frozen=True)
class BodyScan:
    """A patient's scan at a hospital [X, Y, Z], and its true mask: 0, `body.LIVER` or `body.LESION`."""

    hospital: str
    voxels: NDArray[np.int16]
    mask: NDArray[np.uint8]

    @classmethod
    def at(cls, hospital: str, patient: int, seed: int = 0) -> BodyScan:
        """Scan a hospital's patient of that number. `seed` is the federation's."""
        material = hashlib.sha256(f"body\0{seed}\0{hospital}\0{patient}".encode()).digest()
        number = int.from_bytes(material[:6], "big")
        bright, mask = draw_body(np.random.default_rng([number, 0]))
        voxels = scan_body(bright, SCANNERS[hospital], np.random.default_rng([number, 1]))
        return cls(hospital, voxels, mask)

    @property
    def volume(self) -> nib.Nifti1Image:
        """The scan, as `locum.Client` takes it."""
        return _nifti(self.voxels)

    @property
    def true_mask(self) -> nib.Nifti1Image:
        """The true mask, as `locum.Client` takes it."""
        return _nifti(self.mask)

    def dice_of(self, mask: NDArray[np.generic]) -> dict[str, float]:
        """Return each region's Dice, of a mask on the scan's grid; 1 where neither mask has it."""
        scores = {}
        for name, values in REGIONS.items():
            found, true = np.isin(mask, values), np.isin(self.mask, values)
            total = int(found.sum()) + int(true.sum())
            scores[name] = 2 * int((found & true).sum()) / total if total else 1.0
        return scores


def nifti_bytes(voxels: NDArray[np.generic]) -> bytes:
    """Encode a .nii.gz on the grid of the scans. Its bytes depend only on the voxels."""
    content: bytes = _nifti(voxels).to_bytes()
    return gzip.compress(content, compresslevel=6, mtime=0)


def _nifti(voxels: NDArray[np.generic]) -> nib.Nifti1Image:
    affine = np.diag([*VOXEL_MM, 1.0])
    affine[:3, 3] = -np.array(VOXEL_MM) * (np.array(SHAPE) - 1) / 2
    image = nib.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm")
    image.set_qform(affine, code=1)
    return image


def scan_body(bright: Field, scanner: Scanner, draw: np.random.Generator) -> NDArray[np.int16]:
    """Image brightness [X, Y, Z] within [0, 1] with a scanner."""
    seen = ndimage.gaussian_filter(bright, [scanner.blur_mm / mm for mm in VOXEL_MM[:2]] + [0.0])
    seen = np.clip(seen, 0, 1) ** scanner.curve
    seen = seen * np.exp(scanner.shading * smooth(draw, seen.shape, (3, 3, 2)))
    # As in magnitude images, noise does not go below 0: outside the body it is a faint veil.
    real, imaginary = draw.normal(0, scanner.noise, (2, *seen.shape))
    seen = np.hypot(seen + real, imaginary)
    if scanner.inverted:
        seen = 1.1 - seen
    raw = np.clip(np.rint(scanner.gain * seen + scanner.offset), -32768, 32767)
    return np.asarray(raw, np.int16)
