"""What slices and volumes have in common: a class at every place of an image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from model_store.scan import Scan
from model_store.task import Task
from personalization.metrics import dice_by_label, foreground_dice
from personalization.scanner import augment_intensities
from training.data.scan_files import read_case
from training.local.data import Answers, Data
from training.local.schedule import Batch, Schedule


class Masked(Data):
    """Examples with masks."""

    kind = "segmentation"
    dense = True

    targets: Any

    @classmethod
    @override
    def reader(cls, task: Task) -> Callable[[Any], Scan]:
        return partial(read_case, task=task)

    @override
    def with_foreground(self) -> Self:
        found = [index for index, target in enumerate(self.targets) if target.any()]
        return self.take(found) if found else self

    @override
    def changed(
        self, images: Tensor, targets: Tensor, schedule: Schedule, generator: torch.Generator
    ) -> Batch:
        if schedule.intensity and not schedule.randomise:
            return Batch(augment_intensities(images, schedule.intensity, generator), targets)
        return super().changed(images, targets, schedule, generator)

    @override
    def scores(self, answers: Answers, classes: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for rows in self.beside_truth(answers):
            found |= foreground_dice(*rows, classes)
        return found

    @override
    def label_scores(self, answers: Answers, labels: Sequence[Sequence[int]]) -> list[Tensor]:
        return [dice for rows in self.beside_truth(answers) for dice in dice_by_label(*rows, labels).values()]

    @abstractmethod
    @override
    def scans(self, answers: Answers) -> Iterator[tuple[str, tuple[float, ...] | None, Tensor, Tensor]]: ...
