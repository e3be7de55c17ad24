"""Images with a class each: every slice of a volume counts as an image.

Shape suffixes: N images, C channels, H rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from model_store.preprocessing import Prepared, prepare
from model_store.scan import Scan
from model_store.task import Task
from personalization.augmentation import Augmentation, transform_images
from personalization.transfer import CPU, sent
from training.data.cases import LabelledCase
from training.data.classification.npz import read_arrays
from training.data.scan_files import read_scan
from training.local.data import Answers, Examples


@dataclass(frozen=True)
class Images(Examples):
    """Images, with class indices [N] int64 as targets. Any class may be absent."""

    name = "images"
    kind = "classification"
    dense = False
    told = None

    @classmethod
    @override
    def reader(cls, task: Task) -> Callable[[Any], Scan]:
        return _Source().scan

    @classmethod
    @override
    def of_case(cls, case: LabelledCase, scan: Scan, task: Task) -> tuple[Self, Prepared]:
        prepared = prepare(scan, task)
        count = len(prepared.slices)
        return cls(
            prepared.slices,
            np.full(count, case.label, np.int64),
            (case.patient,) * count,
            (case.name,) * count,
            tuple(range(count)),
        ), prepared

    @classmethod
    @override
    def joined(cls, parts: Sequence[Self], task: Task) -> Self:
        images = np.empty((0, task.in_channels, *task.size), np.float32)
        own = [cls(images, np.empty(0, np.int64), (), (), ()), *parts]
        return cls(
            np.concatenate([each.images for each in own]),
            np.concatenate([each.targets for each in own]),
            tuple(patient for each in own for patient in each.patients),
            tuple(case for each in own for case in each.cases),
            tuple(position for each in own for position in each.positions),
        )

    @property
    @override
    def scored(self) -> int:
        return len(self)

    @override
    def epoch(
        self, batch_size: int, generator: torch.Generator, augment: bool, least: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        drawn = labelled_batches(self, batch_size, generator, augment, least, device)
        return (batch[:2] for batch in drawn)

    @staticmethod
    @override
    def turned(images: Tensor, targets: Tensor, angles_B: Tensor, signs_B2: Tensor) -> tuple[Tensor, Tensor]:
        return transform_images(images, angles_B, signs_B2), targets

    @override
    def answered(self, logits: Iterable[Tensor]) -> Tensor:
        return torch.cat([batch.argmax(dim=1).to(torch.uint8).cpu() for batch in logits])

    @override
    def beside_truth(self, answers: Answers) -> Iterator[tuple[Tensor, Tensor, tuple[str, ...]]]:
        """Every image is a case of its own."""
        assert isinstance(answers, Tensor)
        yield answers, torch.from_numpy(self.targets), tuple(map(str, range(len(self))))

    @override
    def scores(self, answers: Answers, classes: int) -> dict[str, float]:
        """1 of an image that is answered right, and 0 of another."""
        ((found, truth, names),) = self.beside_truth(answers)
        return dict(zip(names, (found == truth).double().tolist(), strict=True))

    @override
    def patient_scores(self, answers: Answers, classes: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for patient, score in zip(self.patients, self.scores(answers, classes).values(), strict=True):
            found.setdefault(patient, []).append(score)
        return found


def labelled_batches(
    images: Images,
    batch_size: int,
    generator: torch.Generator,
    augment: bool,
    least: int = 1,
    device: torch.device = CPU,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield one epoch, shuffled: images [B, C, H, W] float32 and labels [B] int64 on a device, and indices
    [B] int64.

    The order and every augmentation depend on `generator` alone. The last batch may be smaller. A last batch
    of a single image is left out after larger batches, because batch norm cannot normalise one image. With
    fewer than `least` images in all, they are taken several times.
    """
    order = torch.randperm(len(images), generator=generator)
    batch_size = max(batch_size, least)
    if 0 < len(order) < least:
        order = order.repeat(math.ceil(least / len(order)))
    pixels, labels = torch.from_numpy(images.images), torch.from_numpy(images.targets)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        if len(chosen) == 1 < len(order) and batch_size > 1:
            continue
        batch = sent(pixels[chosen], device)
        if augment:
            batch = transform_images(batch, *Augmentation().draw(len(chosen), generator))
        yield batch, sent(labels[chosen], device), chosen


class _Source:
    """Reads the scans of cases. An .npz is read only once."""

    def __init__(self) -> None:
        self._arrays: dict[Path, dict[str, NDArray[Any]]] = {}

    def scan(self, case: LabelledCase) -> Scan:
        if case.row is None:
            return read_scan(case.image)
        if case.image not in self._arrays:
            self._arrays[case.image] = read_arrays(case.image)
        name, index = case.row
        voxels = self._arrays[case.image][name][index]
        # The same scan as a PNG of these pixels.
        return Scan(voxels[..., None] if voxels.ndim == 2 else voxels, None, "png")
