"""Slices with masks: a network sees them one by one, and a patient's are scored as one volume.

Shape suffixes: N slices, C channels (a slice and its neighbours), H rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from model_store.preprocessing import Geometry, Prepared, keep_largest, prepare, prepare_mask
from model_store.scan import Scan
from model_store.task import Task
from personalization.augmentation import Augmentation, transform
from personalization.transfer import CPU, sent
from training.data.cases import Case
from training.data.scan_files import read_mask
from training.local.data import Answers, Examples
from training.local.masks import Masked


@dataclass(frozen=True)
class Slices(Masked, Examples):
    """Slices, with class indices [N, H, W] uint8 as targets.

    `spacings` has the millimetres from slice to slice, row to row and column to column of each slice as the
    network gets it, None where they are unknown; it is empty where they are not needed. `task` says what is
    done to answers; without one, nothing.
    """

    name = "slices"

    spacings: tuple[tuple[float, ...] | None, ...] = ()
    task: Task | None = None

    @classmethod
    @override
    def of_case(cls, case: Case, scan: Scan, task: Task) -> tuple[Self, Prepared]:
        prepared = prepare(scan, task)
        classes = prepare_mask(read_mask(case.mask), task, prepared.geometry)
        count = len(classes)
        return cls(
            prepared.slices,
            classes,
            (case.patient,) * count,
            (case.name,) * count,
            tuple(range(count)),
            (_of_the_input(prepared.geometry),) * count,
            task,
        ), prepared

    @classmethod
    @override
    def joined(cls, parts: Sequence[Self], task: Task) -> Self:
        size = task.size
        images = np.empty((0, task.in_channels, *size), np.float32)
        own = [cls(images, np.empty((0, *size), np.uint8), (), (), ()), *parts]
        return cls(
            np.concatenate([each.images for each in own]),
            np.concatenate([each.targets for each in own]),
            tuple(patient for each in own for patient in each.patients),
            tuple(case for each in own for case in each.cases),
            tuple(position for each in own for position in each.positions),
            tuple(spacing for each in own for spacing in each.spacings),
            task,
        )

    @override
    def take(self, indices: Sequence[int]) -> Self:
        chosen = super().take(indices)
        return replace(chosen, spacings=tuple(self.spacings[index] for index in indices if self.spacings))

    @override
    def epoch(
        self, batch_size: int, generator: torch.Generator, augment: bool, least: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self, batch_size, generator, augment, least, device)

    @staticmethod
    @override
    def turned(images: Tensor, targets: Tensor, angles_B: Tensor, signs_B2: Tensor) -> tuple[Tensor, Tensor]:
        return transform(images, targets, angles_B, signs_B2)

    @override
    def answered(self, classes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """By the task's `keep_largest`, as the service does, with all slices of a scan as one volume, and on
        the network's pixels."""
        if self.task is None or not self.task.keep_largest:
            return classes
        for own in self._by_scan().values():
            stack = classes[own].transpose(1, 2, 0)
            found = stack[..., 0] if len(own) == 1 else stack
            keep_largest(found, self.task)
            classes[own] = stack.transpose(2, 0, 1)
        return classes

    @override
    def scans(self, answers: Answers) -> Iterator[tuple[str, tuple[float, ...] | None, Tensor, Tensor]]:
        """[S, H, W] of several slices, [H, W] of one. Distances between scans say nothing, so a patient's are
        taken one by one."""
        assert isinstance(answers, Tensor)
        truth = torch.from_numpy(self.targets)
        for (patient, _), own in self._by_scan().items():
            spacing = self.spacings[own[0]] if self.spacings else None
            if len(own) == 1:
                yield patient, spacing and spacing[1:], answers[own[0]], truth[own[0]]
            else:
                yield patient, spacing, answers[own], truth[own]

    @override
    def pictured(self, answers: Mapping[str, Answers]) -> tuple[Examples, dict[str, NDArray[np.uint8]]]:
        found = {name: answer for name, answer in answers.items() if isinstance(answer, Tensor)}
        return self, {name: answer.numpy() for name, answer in found.items()}

    def _by_scan(self) -> dict[tuple[str, str], list[int]]:
        """Indices of the slices of each patient's scans."""
        found: dict[tuple[str, str], list[int]] = {}
        for index, scan in enumerate(zip(self.patients, self.cases, strict=True)):
            found.setdefault(scan, []).append(index)
        return found


def batches(
    slices: Slices,
    batch_size: int,
    generator: torch.Generator,
    augment: bool,
    least: int = 1,
    device: torch.device = CPU,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one epoch, shuffled: images [B, C, H, W] float32, targets [B, H, W] uint8, on a device.

    The order and every augmentation depend on `generator` alone. The last batch may be smaller; one of fewer
    than `least` slices joins the batch before it. With fewer slices in all, they are taken several times.
    """
    order = torch.randperm(len(slices), generator=generator)
    images, targets = torch.from_numpy(slices.images), torch.from_numpy(slices.targets)
    recipe = Augmentation() if augment else None
    for chosen in grouped(order, batch_size, least):
        batch = sent(images[chosen], device), sent(targets[chosen], device)
        yield transform(*batch, *recipe.draw(len(chosen), generator)) if recipe else batch


def grouped(order: Tensor, batch_size: int, least: int) -> list[Tensor]:
    """Split indices into batches of at least `least`, by joining a smaller last one to the one before it."""
    if 0 < len(order) < least:
        order = order.repeat(math.ceil(least / len(order)))
    groups = list(torch.split(order, max(batch_size, least))) if len(order) else []
    if len(groups) > 1 and len(groups[-1]) < least:
        groups[-2:] = [torch.cat(groups[-2:])]
    return groups


def _of_the_input(geometry: Geometry) -> tuple[float, ...] | None:
    """Millimetres from slice to slice, row to row and column to column of the network's input, if known."""
    if geometry.spacing is None:
        return None
    slice_, *pixel = geometry.spacing
    sides = zip(pixel, geometry.slices[1:], geometry.size, strict=True)
    return (slice_, *(mm * own / resized for mm, own, resized in sides))
