"""The scores of slices that are whole scans: each as it is, on the network's own pixels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from personalization.labelled_slices import LabelledSlices, Score
from personalization.masks import patient_dice
from personalization.metrics import foreground_dice


def score_of(examples: LabelledSlices) -> Score:
    """Scores the patients of these slices."""

    @torch.no_grad()
    def score(network: nn.Module, patients: Collection[str]) -> dict[str, float]:
        device = next(network.parameters()).device
        found = network.eval()(examples.images.to(device)).argmax(dim=1).to("cpu", torch.uint8)
        by_patient = {
            patient: [
                (found[index].numpy(), examples.targets[index].numpy())
                for index, name in enumerate(examples.patients)
                if name == patient
            ]
            for patient in patients
        }
        return {patient: patient_dice(scans, examples.classes) for patient, scans in by_patient.items()}

    return score


@dataclass(frozen=True)
class Practised:
    """A member's slices, each a scan, on the network's own pixels: images [N, C, H, W], truth [N, H, W]."""

    images: NDArray[np.float32]
    truth: Tensor
    patients: tuple[str, ...]

    @classmethod
    def of(cls, images: Tensor, truth: Tensor, patients: Sequence[str]) -> Self:
        """Those of a test."""
        return cls(images.numpy(), truth, tuple(patients))

    def take(self, indices: Sequence[int]) -> Practised:
        """Some of them."""
        chosen = [*indices]
        patients = tuple(self.patients[index] for index in chosen)
        return Practised(self.images[chosen], self.truth[chosen], patients)

    def changed_by(self, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Practised:
        """The same with other intensities."""
        return replace(self, images=np.concatenate([change(each[None]) for each in self.images]))

    def met(self) -> Practised:
        """As they are."""
        return self


@torch.no_grad()
def practised(network: nn.Module, slices: Practised) -> dict[str, float]:
    """Dice of every patient."""
    device = next(network.parameters()).device
    found = network.eval()(torch.from_numpy(slices.images).to(device)).argmax(dim=1).cpu()
    return foreground_dice(found, slices.truth, slices.patients, 2)
