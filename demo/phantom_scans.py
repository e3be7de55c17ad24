"""Scans of phantom patients that nobody has trained on, with their truth, and what may go wrong with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model_store.preprocessing import class_map
from model_store.scan import decode
from personalization.metrics import dice
from training.phantom import SCANNERS, TASK, make_volume, patient_seed
from training.phantom.federation import nifti_bytes

SIZE = 48
# Beyond the patients the federation is written with, and beyond those of any cohort.
NEW_PATIENT = 1000


@dataclass(frozen=True)
class PhantomScan:
    """A patient's scan at a hospital, and the truth about it, both as .nii.gz."""

    hospital: str
    image: bytes
    truth: bytes

    @classmethod
    def at(cls, hospital: str, patient: int = NEW_PATIENT, *, negative: bool = False) -> PhantomScan:
        """The scan of a hospital's patient; `negative` has black and white swapped, as bad exports have."""
        scanner = SCANNERS[hospital]
        affine, shape = scanner.grid(SIZE)
        voxels, mask = make_volume(scanner, patient_seed(0, hospital, patient), affine, shape)
        image = _negative(voxels) if negative else voxels
        return cls(hospital, nifti_bytes(image, affine), nifti_bytes(mask, affine))

    def dice_of(self, mask: bytes) -> float:
        """Foreground Dice of a mask as the service returned it."""
        predicted, true = (torch.from_numpy(class_map(decode(m), TASK)) for m in (mask, self.truth))
        return float(dice(predicted[None], true[None], classes=2)[0, 1])


def unlabeled(hospital: str, count: int, *, negative: bool = False) -> dict[str, bytes]:
    """The scans of a hospital's first patients by name, without the truth: all that a cohort is made of."""
    return {
        f"{number + 1:02d}.nii.gz": PhantomScan.at(hospital, number, negative=negative).image
        for number in range(count)
    }


def _negative(voxels: NDArray[np.int16]) -> NDArray[np.int16]:
    swapped: NDArray[np.int16] = (int(voxels.max()) + int(voxels.min()) - voxels.astype(np.int32)).astype(
        np.int16
    )
    return swapped
