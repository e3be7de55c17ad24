"""Test images of `cross_organ`, and a network's Dice and false alarms on them."""

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

# Per patient: mean Dice of the images with a tumour (None without such images), their number, the number of
# false alarms on images without a tumour, and the number of those images.
Found: TypeAlias = dict[str, tuple[float | None, int, int, int]]


@dataclass(frozen=True)
class TestSet:
    """Test images, decoded once for many networks; `patients` has the patient of every image's name."""

    __test__ = False  # not a test case for pytest

    scans: Scans
    patients: Mapping[str, str]

    @classmethod
    def load(cls, cases: Sequence[Case], task: Task) -> TestSet:
        """Decode and prepare the cases' scans."""
        scans = Scans.load((replace(case, patient=case.name) for case in cases), task)
        return cls(scans, {case.name: case.patient for case in cases})

    def of(self, network: nn.Module) -> Found:
        """A network's results per patient, on every image's own grid."""
        probabilities = torch.split(predict(network, self.scans.images), [s.slices for s in self.scans.scans])
        images = {}
        for scan, part in zip(self.scans.scans, probabilities, strict=True):
            predicted = torch.from_numpy(np.ascontiguousarray(restore(part.numpy(), scan.geometry)))
            images[scan.patient] = judged(predicted, scan.truth)
        return by_patient(images, self.patients)


def judged(predicted: Tensor, truth: Tensor) -> float | bool:
    """Dice of an image with a tumour; without one, whether more than specks of a tumour is found."""
    if bool(truth.any()):
        return float(dice(predicted.flatten()[None], truth.flatten()[None], 2)[0, 1])
    return bool((predicted > 0).double().mean() >= MIN_COMPONENT)


def by_patient(images: Mapping[str, float | bool], patients: Mapping[str, str]) -> Found:
    """Combine every patient's images."""
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
    """The same in the form of the rows."""
    return {patient: list(values) for patient, values in found.items()}
