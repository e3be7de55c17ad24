"""The `Score` of slices that are whole scans: each as it is, on the network's own pixels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
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


def practised(truth: Tensor, patients: Sequence[str]) -> Callable[..., dict[str, float]]:
    """The score of a practice on slices with these masks, as they are."""

    @torch.no_grad()
    def score(network: nn.Module, images: Tensor, indices: list[int]) -> dict[str, float]:
        device = next(network.parameters()).device
        found = network.eval()(images.to(device)).argmax(dim=1).cpu()
        return foreground_dice(found, truth[indices], [patients[index] for index in indices], 2)

    return score
