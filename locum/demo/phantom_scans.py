"""Scans of phantom patients outside every training set, with their true masks.

Some are exported as negatives, and some show nothing but noise.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import nibabel as nib
import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage

from model_store.preprocessing import class_map
from model_store.scan import decode
from personalization.metrics import dice
from training.phantom import SCANNERS, TASK, make_volume, patient_seed
from training.phantom.federation import nifti_bytes

SIZE = 48
# How a scan leaves the scanner: as it is, with black and white swapped, or of nothing.
Export: TypeAlias = Literal["usual", "negative", "noise"]
# Beyond the patients the federation is written with, and beyond those of any cohort.
NEW_PATIENT = 1000


@dataclass(frozen=True)
class PhantomScan:
    """A patient's scan at a hospital and its true mask, both as .nii.gz."""

    hospital: str
    image: bytes
    truth: bytes

    @classmethod
    def at(cls, hospital: str, patient: int = NEW_PATIENT, how: Export = "usual") -> PhantomScan:
        """Draw the scan of a hospital's patient, as it is exported."""
        scanner = SCANNERS[hospital]
        affine, shape = scanner.grid(SIZE)
        voxels, mask = make_volume(scanner, patient_seed(0, hospital, patient), affine, shape)
        image = _EXPORTED[how](voxels)
        return cls(hospital, nifti_bytes(image, affine), nifti_bytes(mask, affine))

    @property
    def volume(self) -> nib.Nifti1Image:
        """The scan, as `locum.Client` takes it."""
        return _opened(self.image)

    @property
    def true_mask(self) -> nib.Nifti1Image:
        """The true mask, as `locum.Client` takes it."""
        return _opened(self.truth)

    def dice_of(self, mask: bytes) -> float:
        """Return the foreground Dice of a mask as the service returned it."""
        predicted, true = (torch.from_numpy(class_map(decode(m), TASK)) for m in (mask, self.truth))
        return float(dice(predicted[None], true[None], classes=2)[0, 1])


def cohort_of(hospital: str, count: int, *, first: int = 0, how: Export = "usual") -> dict[str, PhantomScan]:
    """Draw the scans of `count` patients of a hospital, by file name, from patient `first` on."""
    return {
        f"{number + 1:02d}.nii.gz": PhantomScan.at(hospital, number, how)
        for number in range(first, first + count)
    }


def _opened(content: bytes) -> nib.Nifti1Image:
    return nib.Nifti1Image.from_bytes(gzip.decompress(content))


def _usual(voxels: NDArray[np.int16]) -> NDArray[np.int16]:
    return voxels


def _noise(voxels: NDArray[np.int16]) -> NDArray[np.int16]:
    """Smooth noise of the scan's mean and deviation."""
    generator = np.random.default_rng(int(voxels.astype(np.uint16).sum()))
    drawn = ndimage.gaussian_filter(generator.normal(size=voxels.shape), 2)
    scaled = voxels.mean() + voxels.std() * (drawn - drawn.mean()) / drawn.std()
    return np.asarray(scaled, np.int16)


def _negative(voxels: NDArray[np.int16]) -> NDArray[np.int16]:
    swapped: NDArray[np.int16] = (int(voxels.max()) + int(voxels.min()) - voxels.astype(np.int32)).astype(
        np.int16
    )
    return swapped


_EXPORTED: Mapping[Export, Callable[[NDArray[np.int16]], NDArray[np.int16]]] = {
    "usual": _usual,
    "negative": _negative,
    "noise": _noise,
}
