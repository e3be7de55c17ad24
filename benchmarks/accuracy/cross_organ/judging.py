"""Test images of `cross_organ`, and what a network finds on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness.evaluation import Scans, predict
from model_store.preprocessing import restore
from model_store.task import Task
from personalization.gate.masks import MIN_COMPONENT
from personalization.metrics import dice
from training.data.cases import Case

# Per patient: mean Dice of the images with a tumour (None without one), how many these are, on how many of
# the images without one a tumour is found, and how many those are.
Found: TypeAlias = dict[str, tuple[float | None, int, int, int]]


@dataclass(frozen=True)
class TestSet:
    """Test images, decoded once for many networks; `patients` has the patient of every image's name."""

    __test__ = False  # no test case of pytest's

    scans: Scans
    patients: Mapping[str, str]

    @classmethod
    def load(cls, cases: Sequence[Case], task: Task) -> TestSet:
        """Decode and prepare."""
        scans = Scans.load((replace(case, patient=case.name) for case in cases), task)
        return cls(scans, {case.name: case.patient for case in cases})

    def of(self, network: nn.Module) -> Found:
        """What a network finds, on every image's own grid."""
        probabilities = torch.split(predict(network, self.scans.images), [s.slices for s in self.scans.scans])
        images = {}
        for scan, part in zip(self.scans.scans, probabilities, strict=True):
            predicted = torch.from_numpy(np.ascontiguousarray(restore(part.numpy(), scan.geometry)))
            images[scan.patient] = judged(predicted, scan.truth)
        return by_patient(images, self.patients)


def judged(predicted: Tensor, truth: Tensor) -> float | bool:
    """Dice of an image with a tumour; of one without, whether more than specks of one is found."""
    if bool(truth.any()):
        return float(dice(predicted.flatten()[None], truth.flatten()[None], 2)[0, 1])
    return bool((predicted > 0).double().mean() >= MIN_COMPONENT)


def by_patient(images: Mapping[str, float | bool], patients: Mapping[str, str]) -> Found:
    """Every patient's images together."""
    found: dict[str, tuple[list[float], list[bool]]] = {}
    for name, value in images.items():
        bearing, empty = found.setdefault(patients[name], ([], []))
        if isinstance(value, bool):
            empty.append(value)
        else:
            bearing.append(value)
    return {
        patient: (round(float(np.mean(b)), 6) if b else None, len(b), sum(e), len(e))
        for patient, (b, e) in sorted(found.items())
    }


def as_json(found: Found) -> dict[str, Any]:
    """As rows have it."""
    return {patient: list(values) for patient, values in found.items()}
