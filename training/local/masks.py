"""What slices and volumes have in common: a class at every place of an image.

Answers are scored on the scan's own grid, against the mask as it was drawn, since that is what a service
gives: `model_store.preprocessing.answers` makes both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from model_store.preprocessing import Geometry, VolumeGrid, classes_on
from model_store.scan import Scan
from model_store.task import Task
from personalization.metrics import dice_by_label, foreground_dice
from personalization.scanner import augment_intensities
from personalization.told import IGNORED, Told
from training.data.cases import Case
from training.data.scan_files import mask_of, read_case
from training.local.data import Answers, Data
from training.local.schedule import Batch, Schedule


@dataclass(frozen=True)
class Drawn:
    """A scan as a person drew on it: class indices on its own grid, [H, W] or [I, J, K].

    `grid` is the way there from the network's, None where only the network's pixels are known. `spacing` has
    the millimetres per voxel along the scan's own axes, None where they are unknown.
    """

    patient: str
    grid: Geometry | VolumeGrid | None
    truth: NDArray[np.uint8]
    spacing: tuple[float, ...] | None = None

    @classmethod
    def of(cls, case: Case, scan: Scan, task: Task, grid: Geometry | VolumeGrid) -> Drawn:
        """The mask of a case. Raises LocumStoreError."""
        spacing = None
        if scan.affine is not None:
            lengths = np.linalg.norm(scan.affine[:3, :3], axis=0) * scan.mm_per_unit
            spacing = tuple(map(float, lengths))
        # A copy: the mask may be a view that runs against its file's axes, which torch does not take.
        return cls(case.patient, grid, classes_on(scan, mask_of(case), task).copy(), spacing)


def told_by(task: Task, undrawn: Collection[str] = ()) -> Told | None:
    """What the masks of a site that does not draw some labels can tell; None: everything."""
    # With 256 classes there is no index left for a place without a truth, and the task has none.
    if (not undrawn and not task.ignore) or len(task.classes) > IGNORED:
        return None
    known = [tuple(label for label in each.labels if label not in undrawn) for each in task.classes]
    groups = tuple(known.index(labels) for labels in known)
    if not task.regions:
        return Told(groups)
    members = tuple(map(tuple, task.region_members.tolist()))
    return Told(groups, members, tuple(label not in undrawn for label in task.regions))


class Masked(Data):
    """Examples with masks. There is an answer to each of the `scans_drawn`, [H, W] or [I, J, K]."""

    kind = "segmentation"
    dense = True

    targets: Any

    @property
    @abstractmethod
    def scans_drawn(self) -> tuple[Drawn, ...]:
        """The scans behind the examples, in their order."""

    @classmethod
    @override
    def reader(cls, task: Task) -> Callable[[Any], Scan]:
        return partial(read_case, task=task)

    @override
    def with_foreground(self) -> Self:
        told = self.told is not None
        found = [
            index
            for index, target in enumerate(self.targets)
            if (np.any((target != 0) & (target != IGNORED)) if told else target.any())
        ]
        return self.take(found) if found else self

    @override
    def changed(
        self, images: Tensor, targets: Tensor, schedule: Schedule, generator: torch.Generator
    ) -> Batch:
        if schedule.intensity and not schedule.randomise:
            return Batch(augment_intensities(images, schedule.intensity, generator), targets, told=self.told)
        return super().changed(images, targets, schedule, generator)

    def compared(self, found: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
        """An answer and the truth as scores compare them."""
        return (found, truth) if self.told is None else self.told.compared(found, truth)

    @override
    def scores(self, answers: Answers, classes: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for rows in self.beside_truth(answers):
            found |= foreground_dice(*rows, classes)
        return found

    @override
    def label_scores(self, answers: Answers, labels: Sequence[Sequence[int]]) -> list[Tensor]:
        return [dice for rows in self.beside_truth(answers) for dice in dice_by_label(*rows, labels).values()]

    @override
    def beside_truth(self, answers: Answers) -> Iterator[tuple[Tensor, Tensor, tuple[str, ...]]]:
        """One patient after the other, all voxels in one row: scans have shapes of their own."""
        by_patient: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for drawn, answer in zip(self.scans_drawn, answers, strict=True):
            pair = answer.flatten(), torch.from_numpy(drawn.truth).flatten()
            by_patient.setdefault(drawn.patient, []).append(pair)
        for patient, pairs in by_patient.items():
            found, truth = (torch.cat(each)[None] for each in zip(*pairs, strict=True))
            yield *self.compared(found, truth), (patient,)

    @override
    def scans(self, answers: Answers) -> Iterator[tuple[str, tuple[float, ...] | None, Tensor, Tensor]]:
        """Distances between scans say nothing, so a patient's are taken one by one. A volume of one
        slice is that slice."""
        for drawn, answer in zip(self.scans_drawn, answers, strict=True):
            kept = [axis for axis, side in enumerate(drawn.truth.shape) if side > 1 or drawn.truth.ndim == 2]
            spacing = drawn.spacing and tuple(drawn.spacing[axis] for axis in kept)
            sides = [drawn.truth.shape[axis] for axis in kept]
            found, truth = self.compared(answer, torch.from_numpy(drawn.truth))
            yield drawn.patient, spacing, found.reshape(sides), truth.reshape(sides)
