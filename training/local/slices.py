"""Slices with masks: a network sees them one by one, and a patient's are scored as one volume.

Shape suffixes: N slices, C channels (a slice and its neighbours), H rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from model_store.preprocessing import Geometry, Prepared, finish, keep_largest, onto_slices, prepare
from model_store.scan import Scan
from model_store.task import Task
from personalization.augmentation import Augmentation, transform
from personalization.outputs import as_arrays
from personalization.told import Told
from personalization.transfer import CPU, sent
from training.data.cases import Case
from training.local.data import Answers, Examples
from training.local.masks import Drawn, Masked


@dataclass(frozen=True)
class Slices(Masked, Examples):
    """Slices, with class indices [N, H, W] uint8 as targets.

    `drawn` has the scans behind the slices, in their order, each with all of its slices. Without it, as where
    slices without foreground are left out, a scan's slices are answered on the network's pixels. `task` says
    what is done to answers; without one, nothing.
    """

    name = "slices"

    drawn: tuple[Drawn, ...] = ()
    task: Task | None = None
    told: Told | None = None

    @classmethod
    @override
    def of_case(cls, case: Case, scan: Scan, task: Task) -> tuple[Self, Prepared]:
        prepared = prepare(scan, task)
        drawn = Drawn.of(case, scan, task, prepared.geometry)
        return cls.of_drawn(case, prepared, drawn, task), prepared

    @classmethod
    def of_drawn(cls, case: Case, prepared: Prepared, drawn: Drawn, task: Task) -> Self:
        """The slices of a prepared scan, with what was drawn on it."""
        classes = onto_slices(drawn.truth, prepared.geometry)
        count = len(classes)
        return cls(
            prepared.slices,
            classes,
            (case.patient,) * count,
            (case.name,) * count,
            tuple(range(count)),
            (drawn,),
            task,
        )

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
            tuple(drawn for each in own for drawn in each.drawn),
            task,
        )

    @override
    def met(self) -> Self:
        """Without what the masks cannot tell, which is background."""
        if self.told is None:
            return self
        return replace(self, targets=self.told.first(torch.from_numpy(self.targets)).numpy())

    @override
    def take(self, indices: Sequence[int]) -> Self:
        """`drawn` stays where whole scans are taken, in their order."""
        wanted = {*indices}
        scans = [
            (places, drawn)
            for places, drawn in zip(self.by_scan().values(), self.drawn, strict=bool(self.drawn))
            if wanted.issuperset(places)
        ]
        whole = [place for places, _ in scans for place in places] == list(indices)
        return replace(super().take(indices), drawn=tuple(drawn for _, drawn in scans) if whole else ())

    @override
    def epoch(
        self, batch_size: int, generator: torch.Generator, augment: bool, least: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self, batch_size, generator, augment, least, device)

    @staticmethod
    @override
    def turned(images: Tensor, targets: Tensor, angles_B: Tensor, signs_B2: Tensor) -> tuple[Tensor, Tensor]:
        return transform(images, targets, angles_B, signs_B2)

    @property
    @override
    def scans_drawn(self) -> tuple[Drawn, ...]:
        if self.drawn:
            return self.drawn
        return tuple(
            Drawn(patient, None, self.targets[own[0] if len(own) == 1 else own])
            for (patient, _), own in self.by_scan().items()
        )

    @override
    def together(self, queries_NQ: Tensor) -> Tensor:
        """The mean over the slices of a scan, as the service routes a volume."""
        found = queries_NQ.clone()
        for own in self.by_scan().values():
            if len(own) > 1:
                found[own] = found[own].double().mean(dim=0).float()
        return found

    @override
    def answered(self, logits: Iterable[Tensor]) -> list[Tensor]:
        probabilities = (found for batch in logits for found in as_arrays(batch, "probabilities"))
        if not self.drawn:
            classes = np.stack([each.argmax(axis=0).astype(np.uint8) for each in probabilities])
            return [self._kept(classes[own]) for own in self.by_scan().values()]
        found = []
        for drawn in self.drawn:
            assert isinstance(drawn.grid, Geometry)
            assert self.task is not None
            own = (each[np.newaxis] for each in islice(probabilities, drawn.grid.slices[0]))
            found.append(torch.from_numpy(finish(drawn.grid, self.task, own)[0].copy()))
        return found

    def _kept(self, classes: NDArray[np.uint8]) -> Tensor:
        """The answer to a scan of the network's pixels, [H, W] or [S, H, W], of its slices' classes."""
        found = classes[0] if len(classes) == 1 else classes
        if self.task is not None:
            keep_largest(found, self.task)
        return torch.from_numpy(found)

    @override
    def pictured(self, answers: Mapping[str, Answers]) -> tuple[Examples, dict[str, NDArray[np.uint8]]]:
        """On the network's pixels."""

        def pictures(found: Answers) -> NDArray[np.uint8]:
            classes = np.empty_like(self.targets)
            scans = zip(self.by_scan().values(), self.scans_drawn, found, strict=True)
            for own, drawn, answer in scans:
                here = answer.numpy()
                if isinstance(drawn.grid, Geometry):
                    here = onto_slices(here, drawn.grid)
                classes[own] = here
            return classes

        return self.met(), {name: pictures(found) for name, found in answers.items()}

    def by_scan(self) -> dict[tuple[str, str], list[int]]:
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
