"""The data of a site in memory: `Data`, the interface of a kind of task, of which there is a class per kind.

A class loads the examples of its kind, batches them, answers them with a network, and scores the answers.
`training.local.registry` names the class of a task.

Shape suffixes: N examples (a volume's slices count one by one), C channels, H rows, W columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from model_store.preprocessing import Prepared, PreparedVolume, geometry_of
from model_store.scan import Scan
from model_store.task import Task, TaskKind
from personalization.domain_randomisation import randomise_half
from personalization.told import Told
from training.algorithm import State
from training.local.schedule import Batch, Schedule

# Class indices uint8: [N] of images with classes; on its own grid, [H, W] or [I, J, K], of each scan.
Answers: TypeAlias = Tensor | list[Tensor]


class ScanSize(NamedTuple):
    """The images that a network meets of a scan, and the passes in which it answers it."""

    images: int
    passes: int


class Data(ABC):
    """Examples of one kind of task, which a site trains, validates or tests on."""

    # In configurations and errors.
    name: ClassVar[str]
    # As manifests call it: metrics, losses and methods are for such a kind.
    kind: ClassVar[TaskKind]
    # Whether an answer has a class at every place of an image, so that there are outlines to draw.
    dense: ClassVar[bool]
    # Whether a pass is too short to count training by: a volume is one patch of it.
    short_pass: ClassVar[bool] = False
    # The most images that `met` gives; None: all.
    most_met: ClassVar[int | None] = None

    images: Any
    patients: tuple[str, ...]
    cases: tuple[str, ...]
    # What the masks can tell; None: everything.
    told: Told | None

    @abstractmethod
    def __len__(self) -> int: ...

    # ------------------------------------------------------------------ loading

    @classmethod
    @abstractmethod
    def reader(cls, task: Task) -> Callable[[Any], Scan]:
        """What decodes the scan of each case of a site; it raises ScanError."""

    @classmethod
    @abstractmethod
    def of_case(cls, case: Any, scan: Scan, task: Task) -> tuple[Self, Prepared | PreparedVolume]:
        """The examples of one case, and its prepared scan. Raises LocumStoreError."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self], task: Task) -> Self:
        """The examples of several cases or sites, in their order; of nothing, none."""

    @classmethod
    @abstractmethod
    def size_of(cls, case: Any, task: Task) -> ScanSize:
        """How much work the scan of a case is. Raises ScanError."""

    @abstractmethod
    def take(self, indices: Sequence[int]) -> Self:
        """Return some of the examples, in this order."""

    def with_foreground(self) -> Self:
        """Return the examples that have anything but background, or all where that says nothing."""
        return self

    @property
    def scored(self) -> int | None:
        """The most that a score of these examples can count, if that is not the number of cases."""
        return None

    # ------------------------------------------------------------------ training

    @classmethod
    def augmentation(cls, steps: int) -> float:  # noqa: ARG003
        """The share of the usual augmentation that suits a training of so many steps at a site."""
        return 1.0

    @abstractmethod
    def batches(
        self, schedule: Schedule, generator: torch.Generator, least: int, device: torch.device
    ) -> Iterator[Batch]:
        """The batches of the schedule, in their order, on a device. None has fewer than `least` images."""

    def changed(
        self, images: Tensor, targets: Tensor, schedule: Schedule, generator: torch.Generator
    ) -> Batch:
        """A batch with the schedule's changes of intensity."""
        if schedule.randomise:
            changed, randomised = randomise_half(images, generator)
            return Batch(changed, targets, randomised, self.told)
        return Batch(images, targets, told=self.told)

    @abstractmethod
    def single(self, batch_size: int) -> NDArray[np.float32] | None:
        """An image [1, C, ...] that would be a batch of its own; None where every batch has several."""

    def viewed(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Patient and images [n, C, ...] of one scan after the other: its slices, or the whole volume."""
        for _, rows in groupby(range(len(self)), lambda index: self.cases[index]):
            indices = [*rows]
            yield self.patients[indices[0]], np.stack([self.images[index] for index in indices])

    @abstractmethod
    def changed_by(self, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Self:
        """Return the examples with other images; `change` gets those [n, C, ...] of one scan at a time."""

    @abstractmethod
    def met(self) -> Examples:
        """The images as a network meets them when it serves: slices as they are, volumes by windows."""

    # ------------------------------------------------------------------ answers and scores

    @abstractmethod
    def answers(self, network: nn.Module, batch_size: int, device: torch.device) -> Answers:
        """What a network in evaluation mode on `device` answers, as the service does."""

    @abstractmethod
    def beside_truth(self, answers: Answers) -> Iterator[tuple[Tensor, Tensor, tuple[str, ...]]]:
        """Answers and truth [N, ...] and the names of the N patients or images, as the metrics take them."""

    @abstractmethod
    def scores(self, answers: Answers, classes: int) -> dict[str, float]:
        """The metric that chooses models, of every patient or image; NaN where it is undefined."""

    def patient_scores(self, answers: Answers, classes: int) -> dict[str, list[float]]:
        """The same by patient, of whom there may be several images."""
        return {patient: [score] for patient, score in self.scores(answers, classes).items()}

    def label_scores(self, answers: Answers, labels: Sequence[Sequence[int]]) -> list[Tensor]:  # noqa: ARG002
        """That metric of each label [L], of every patient; a label is its class indices."""
        return []

    def scans(
        self,
        answers: Answers,  # noqa: ARG002
    ) -> Iterator[tuple[str, tuple[float, ...] | None, Tensor, Tensor]]:
        """Patient, spacing in millimetres, answer and truth of every scan that has surfaces to measure."""
        return iter(())

    def pictured(self, answers: Mapping[str, Answers]) -> tuple[Examples, dict[str, NDArray[np.uint8]]]:
        """Slices to draw, and the classes on them that each model answers. Only of a dense kind."""
        raise NotImplementedError(f"{self.name} have no outlines")

    # ------------------------------------------------------------------ for centralised training

    @abstractmethod
    def packed(self) -> State:
        """Images and answers as they travel, without names."""

    @classmethod
    @abstractmethod
    def unpacked(cls, state: State, task: Task) -> Self:
        """The examples that a site packed."""


@dataclass(frozen=True)
class Examples(Data):
    """Images [N, C, H, W] float32 of one size and their answers, with the patient and the origin of each.

    `targets` is [N, ...]. `cases` has the names of files or cases, `positions` the index of the slice within
    its volume (0 for a 2-D image).
    """

    images: NDArray[np.float32]
    targets: NDArray[Any]
    patients: tuple[str, ...]
    cases: tuple[str, ...]
    positions: tuple[int, ...]

    @override
    def __len__(self) -> int:
        return len(self.images)

    @classmethod
    @override
    def size_of(cls, case: Any, task: Task) -> ScanSize:
        slices = int(geometry_of(cls.reader(task)(case), task).slices[0])
        return ScanSize(slices, slices)

    @override
    def take(self, indices: Sequence[int]) -> Self:
        chosen = list(indices)
        return replace(
            self,
            images=self.images[chosen],
            targets=self.targets[chosen],
            patients=tuple(self.patients[index] for index in chosen),
            cases=tuple(self.cases[index] for index in chosen),
            positions=tuple(self.positions[index] for index in chosen),
        )

    @abstractmethod
    def epoch(
        self, batch_size: int, generator: torch.Generator, augment: bool, least: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass, shuffled: images [B, C, H, W] and targets [B, ...], on a device."""

    @staticmethod
    @abstractmethod
    def turned(images: Tensor, targets: Tensor, angles_B: Tensor, signs_B2: Tensor) -> tuple[Tensor, Tensor]:
        """A batch, augmented by what `Augmentation.draw` drew."""

    @override
    def batches(
        self, schedule: Schedule, generator: torch.Generator, least: int, device: torch.device
    ) -> Iterator[Batch]:
        done = 0
        for epoch in count():
            # An epoch may have fewer batches than images would fill, so epochs are counted as epochs.
            if schedule.steps is None and epoch >= schedule.epochs and done >= schedule.least_steps:
                return
            drawn = self.epoch(schedule.batch_size, generator, schedule.augment, least, device)
            for images, targets in drawn:
                batch = self.changed(images, targets, schedule, generator)
                enough = (
                    schedule.steps
                    if schedule.steps is not None
                    else (schedule.least_steps if epoch >= schedule.epochs else None)
                )
                if enough is not None and done >= enough:
                    return
                yield batch
                done += 1

    @override
    def single(self, batch_size: int) -> NDArray[np.float32] | None:
        if not len(self) or (batch_size > 1 and len(self) % batch_size != 1):
            return None
        return self.images[:1]

    @override
    def changed_by(self, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Self:
        return replace(self, images=np.concatenate([change(images) for _, images in self.viewed()]))

    @override
    def met(self) -> Examples:
        return self

    @override
    def answers(self, network: nn.Module, batch_size: int, device: torch.device) -> Answers:
        parts = torch.split(torch.from_numpy(self.images), batch_size)
        # A copy is aligned as torch aligns, whatever numpy did: some kernels add up in another order
        # otherwise.
        return self.answered(network(part.clone().to(device)) for part in parts)

    def together(self, queries_NQ: Tensor) -> Tensor:
        """What each example is looked up by in a pool of entries, of the queries of all."""
        return queries_NQ

    @abstractmethod
    def answered(self, logits: Iterable[Tensor]) -> Answers:
        """The answer that a service gives by these logits [B, K, ...] of all examples, in their order."""

    @override
    def packed(self) -> State:
        return {"images": torch.from_numpy(self.images), "answers": torch.from_numpy(self.targets)}

    @classmethod
    @override
    def unpacked(cls, state: State, task: Task) -> Self:
        images, answers = state["images"].numpy(), state["answers"].numpy()
        unnamed = ("",) * len(images)
        return cls(images, answers, unnamed, unnamed, (0,) * len(images))


def slices_of(data: Data) -> Examples:
    """The data of what works on images alone. Raises TypeError for volumes, which a run refuses earlier."""
    if not isinstance(data, Examples):
        raise TypeError(f"expected slices, found {data.name}")
    return data
