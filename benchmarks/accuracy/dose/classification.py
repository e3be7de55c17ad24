"""The same question for a classification: balanced accuracy of the hospital's images, instead of Dice.

Without masks the gate has its cap and its licence alone.

Legend: N images, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.dose.hospital import LADDER, Trained, facts_of, rung_of
from benchmarks.accuracy.outside.hospital import MOST_SLICES, halves, short
from benchmarks.harness.evaluation import predict
from model_store.preprocessing import prepare
from model_store.task import Task
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.cases import Federation, LabelledCase
from training.data.scan_files import read_scan
from training.run import Run


@dataclass(frozen=True)
class Images:
    """A hospital's images [N, C, H, W], their classes [N], and the patient of each."""

    images: Tensor
    classes: Tensor
    patients: tuple[str, ...]

    @classmethod
    def load(
        cls, cases: Iterable[LabelledCase], task: Task, rung: str = "0", site: str = "", seed: int = 0
    ) -> Images:
        """Decode, change by the rung, and prepare."""
        change = rung_of(rung, site, seed)
        images, classes, patients = [], [], []
        for case in cases:
            scan = read_scan(case.image)
            images.append(torch.tensor(prepare(change(scan) if change else scan, task).slices))
            classes.append(case.label)
            patients.append(case.patient)
        return cls(torch.cat(images), torch.tensor(classes), tuple(patients))

    def of(self, patients: Collection[str]) -> Images:
        """The images of some patients."""
        return self._only([n for n, patient in enumerate(self.patients) if patient in patients])

    def thinned(self, most: int) -> Images:
        """Evenly spaced images, `most` at most."""
        return self._only(range(0, len(self.images), -(-len(self.images) // most)))

    def _only(self, numbers: Sequence[int]) -> Images:
        kept = list(numbers)
        return Images(self.images[kept], self.classes[kept], tuple(self.patients[n] for n in kept))

    @property
    def patient_index(self) -> list[int]:
        """For every image the number of its patient."""
        numbers = {patient: number for number, patient in enumerate(sorted(set(self.patients)))}
        return [numbers[patient] for patient in self.patients]

    def balanced_accuracy(self, network: nn.Module) -> float:
        """The mean, over the classes that are there, of the share that is recognised."""
        right = predict(network, self.images).argmax(dim=1) == self.classes
        there = sorted(set(self.classes.tolist()))
        return float(torch.stack([right[self.classes == each].double().mean() for each in there]).mean())


@dataclass(frozen=True)
class Classifiers:
    """Trains what cells need, each federation once, in `folder`. `method` has fields of FedAvgConfig."""

    federation: Federation[LabelledCase]
    folder: Path
    method: Mapping[str, Any]
    workers: int
    device: str = "cpu"

    def served(self, site: str, seed: int, rungs: Sequence[str]) -> dict[str, Any]:
        """What every dose does to the global model's balanced accuracy, by rung; `home` as for Dice."""
        settings = RunConfig(seed=seed, leave_out=(site,), device=self.device)
        run = Run(self.federation, "fedavg", FedAvgConfig(**self.method), settings)
        trained, task = Trained.of(run, self.folder / run.id, self.workers), self.federation.task
        home = {
            member.name: short(
                Images.load(member.of_split("test"), task).balanced_accuracy(trained.network())
            )
            for member in run.sites()
        }
        cases = self.federation.site(site).cases
        found = {rung: self._at(trained, Images.load(cases, task, rung, site, seed), seed) for rung in rungs}
        return {"device": self.device, "home": home, "at": found}

    def _at(self, trained: Trained, images: Images, seed: int) -> dict[str, Any]:
        first, second = (images.of(half) for half in halves(sorted(set(images.patients)), seed))
        changes: dict[str, list[float]] = {name: [] for name in ("auto", "by shift", *LADDER)}
        levels, cohorts = [], []
        for learned, reported in ((first, second), (second, first)):
            cohort = learned.thinned(MOST_SLICES)
            level = reported.balanced_accuracy(trained.network())
            levels.append(level)
            for name, doses in LADDER.items():
                changes[name].append(reported.balanced_accuracy(trained.dosed(cohort.images, doses)) - level)
            made = trained.auto(cohort.images, cohort.patient_index)
            change = reported.balanced_accuracy(made.adapted.merged) - level
            changes["by shift"].append(change)
            changes["auto"].append(change if made.passed else 0.0)
            cohorts.append({"slices": len(cohort.images), **facts_of(made, change)})
        mean = {name: [short(sum(found) / len(found))] for name, found in changes.items()}
        level = short(sum(levels) / len(levels))
        return {"arms": {"global": level, "patients": len(set(images.patients)), **mean}, "cohorts": cohorts}
