"""A network's answers to some patients, with what can be said of each without a label.

The service's own code answers (`model_store.preprocessing.finish`) and says how sure it is
(`service.inference`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import nn

from benchmarks.accuracy.review.entropy import Entropy
from model_store.preprocessing import Geometry, VolumeGrid, finish, outputs_of, windowed
from model_store.preprocessing.volume_restore import as_probabilities
from model_store.task import Task
from personalization.metrics import dice_by_label
from personalization.outputs import outputs
from service.inference.confidence import SoftDice, agreement
from training.local.data import Data
from training.local.slices import Slices
from training.local.volumes import Volumes

BATCH = 16
# The least deviation of a logarithm: a cohort with equal answers would make any other infinitely far.
_LEAST = 0.05
Classes: TypeAlias = NDArray[np.uint8]
Planes: TypeAlias = Iterator[NDArray[np.float32]]


@dataclass(frozen=True)
class Answer:
    """To all images of a patient.

    Attributes:
        classes: of every voxel of the patient's scans, in one row.
        dice: mean over labels, 1 where neither answer nor truth has one.
        sdc: mean over labels (`SoftDice`).
        empty: whether a label is nowhere.
        entropy: as the service said it before.
        logs: logarithms of volume and number of parts of every label, [2, L].
    """

    classes: Classes
    dice: float
    sdc: float
    empty: bool
    entropy: float
    logs: NDArray[np.float64]


Answers: TypeAlias = dict[str, Answer]


class _Noted:
    """What the network says of one patient, and the masks of each scan."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.confidence = SoftDice(task)
        self.uncertainty = Entropy(regions=bool(task.regions))
        self.masks: list[Classes] = []

    def slices(self, batches: Planes) -> Planes:
        """Note the probabilities of slices [S, K, H, W] before they are restored."""
        for p in batches:
            self._add(p)
            yield p

    def planes(self, planes: Planes) -> Planes:
        """Note the outputs of a volume's planes [K, ...], as the service notes them."""
        regions = bool(self._task.regions)
        for plane in planes:
            known = outputs_of(self._task) == "probabilities"
            self._add((plane if known else as_probabilities(plane, regions=regions))[np.newaxis])
            yield plane

    def _add(self, p: NDArray[np.float32]) -> None:
        self.confidence.add(p)
        self.uncertainty.add(p)

    def answer(self, dice: float) -> Answer:
        labels = [self._task.label_classes(label) for label in self._task.labels]
        found = [[np.isin(mask, classes) for mask in self.masks] for classes in labels]
        volumes = [sum(int(each.sum()) for each in masks) for masks in found]
        parts = [sum(int(ndimage.label(each)[1]) for each in masks) for masks in found]
        return Answer(
            np.concatenate([mask.ravel() for mask in self.masks]),
            dice,
            fmean(self.confidence.values.values()),
            not all(volumes),
            self.uncertainty.value,
            np.log1p([volumes, parts]),
        )


def answered(network: nn.Module, data: Data) -> Answers:
    """By patient. The network is in evaluation mode."""
    known = cast(Slices | Volumes, data)
    task = _task_of(known)
    if task.geometry is None:
        found = _of_slices(network, cast(Slices, data))
    else:
        found = _of_volumes(network, cast(Volumes, data))
    masks = [mask for _, _, mask in found]
    labels = [task.label_classes(label) for label in task.labels]
    dice = {
        patient: float(dice_by_label(mask, truth, (patient,), labels)[patient].nan_to_num(1.0).mean())
        for mask, truth, (patient,) in known.beside_truth(masks_as_tensors(masks))
    }
    noted: dict[str, _Noted] = {}
    for patient, each, mask in found:
        noted[patient] = each
        each.masks.append(mask)
    return {patient: each.answer(dice[patient]) for patient, each in noted.items()}


_Found: TypeAlias = list[tuple[str, _Noted, Classes]]


def _task_of(data: Slices | Volumes) -> Task:
    task = data.task
    assert task is not None
    return task


def _of_slices(network: nn.Module, data: Slices) -> _Found:
    task, noted, start = _task_of(data), dict[str, _Noted](), 0
    assert data.drawn
    runs = range(0, len(data), BATCH)
    p = np.concatenate([outputs(network, data.images[at : at + BATCH], "probabilities") for at in runs])
    found = []
    for drawn in data.drawn:
        assert isinstance(drawn.grid, Geometry)
        end = start + drawn.grid.slices[0]
        own = noted.setdefault(drawn.patient, _Noted(task))
        found.append((drawn.patient, own, finish(drawn.grid, task, own.slices(iter([p[start:end]])))[0]))
        start = end
    return found


def _of_volumes(network: nn.Module, data: Volumes) -> _Found:
    task, noted = data.task, dict[str, _Noted]()
    kind, regions = outputs_of(task), bool(task.regions)

    def run(patch: NDArray[np.float32]) -> NDArray[np.float32]:
        given: NDArray[np.float32] = outputs(network, patch[np.newaxis], kind, regions=regions)[0]
        return given

    found = []
    for image, drawn in zip(data.images, data.scans_drawn, strict=True):
        assert isinstance(drawn.grid, VolumeGrid)
        own = noted.setdefault(drawn.patient, _Noted(task))
        planes = own.planes(windowed(image, drawn.grid, task, run))
        found.append((drawn.patient, own, finish(drawn.grid, task, planes)[0]))
    return found


def masks_as_tensors(masks: Sequence[Classes]) -> list[torch.Tensor]:
    """As scores take answers; a copy, since masks may be views that run backwards."""
    return [torch.from_numpy(mask.copy()) for mask in masks]


def agreement_of(answers: Sequence[Answer], task: Task) -> float:
    """Mean over labels and pairs of answers to one patient."""
    pairs = itertools.combinations(answers, 2)
    return fmean(fmean(agreement(a.classes, b.classes, task).values()) for a, b in pairs)


def oddness(answer: Answer, cohort: Sequence[Answer]) -> tuple[float, float]:
    """Robust z of the volumes and of the numbers of parts against a cohort's answers, largest over labels.

    z = |v - median| / max(1.4826 MAD, 0.05)   of logarithms v
    """
    own = np.stack([each.logs for each in cohort])
    middle = np.median(own, axis=0)
    deviation = np.maximum(1.4826 * np.median(abs(own - middle), axis=0), _LEAST)
    size, pieces = (abs(answer.logs - middle) / deviation).max(axis=1).tolist()
    return size, pieces


def of_patients(answers: Mapping[str, Answer], patients: Sequence[str]) -> list[Answer]:
    """Those of some patients, of whom some may have none."""
    return [answers[patient] for patient in patients if patient in answers]
