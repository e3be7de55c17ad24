"""A cell of `dose`: the federation of the other hospitals trains, and serves the one that is left out.

The hospital's patients are halved. Each half is the cohort of a job in turn, and the other
half is scored. Labels are for reporting only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.dose.kinds import KINDS, shifted
from benchmarks.accuracy.dose.masks import by_masks
from benchmarks.accuracy.dose.planted import ONE_LAYER, overdosed_tent, shuffled
from benchmarks.accuracy.outside.hospital import (
    MOST_SLICES,
    Dice,
    HeldOutHospital,
    Turn,
    arms_of,
    change_of,
    dice_of,
    short,
    some_of,
)
from benchmarks.accuracy.outside.scanner import SEVERITIES, ShiftedScanner
from benchmarks.harness.evaluation import Scans, mean_dice
from model_store.guard import ReferenceStatistics, ScanSummary, check, is_mistaken, summarise
from model_store.preprocessing import prepare
from model_store.scan import Scan
from model_store.task import Task
from personalization.dose import ByShift, by_shift, view
from personalization.gate import ROUTING, ObservedRouting, consensus, judge, shift_of_statistics
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import FILE, Spread
from personalization.test_time.ladder import blended
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.cases import Federation
from training.data.scan_files import read_scan
from training.run import Run, execute

# A rung of the ladder, or a kind of shift.
RUNGS: tuple[str, ...] = (*map(str, SEVERITIES), *KINDS)
AS_IT_IS = "0"
# The last amendment of the protocol that changed a dose or a gate: rows are served and judged by it.
AMENDMENT = 8
FULL = (1.0, 1.0, 1.0)
# Doses without a gate, beside the one by shift.
LADDER = {
    "quarter": (0.25, 0.25, 0.25),
    "half": (0.5, 0.5, 0.5),
    "full": FULL,
    "early": (1.0, 0.5, 0.0),
}


def rung_of(rung: str, site: str, seed: int) -> Callable[[Scan], Scan] | None:
    """What changes the scans of a hospital; None where they stay as they are."""
    return shifted(rung, site, seed) if rung in KINDS else ShiftedScanner.of(site, seed).at(int(rung))


@dataclass(frozen=True)
class Trained:
    """What a federation published: global model, how far members are apart, what their scans are like."""

    space: RoutingSpace
    spread: Spread
    reference: ReferenceStatistics | None
    task: Task
    device: torch.device

    @classmethod
    def of(cls, run: Run, folder: Path, workers: int) -> Trained:
        """Train the federation, or read it where it was trained before."""
        publication = execute(run, folder, workers=workers, resume=True).publication
        (draft,) = publication.models
        space = RoutingSpace.of(draft.network.name, draft.network.arguments, {}, draft.weights)
        spread = Spread.model_validate_json(publication.files[FILE])
        device = torch.device(run.settings.device)
        return cls(space, spread, publication.statistics, run.federation.task, device)

    def network(self) -> nn.Module:
        """A copy of the global model."""
        return self.space.plain().to(self.device).eval()

    def dosed(self, images_NCHW: Tensor, doses: tuple[float, float, float]) -> nn.Module:
        """The global model with a dose of the images' statistics."""
        return blended(self.network(), images_NCHW.to(self.device), doses)

    def auto(
        self, images_NCHW: Tensor, patients_N: Sequence[int], summaries: Sequence[ScanSummary] = ()
    ) -> ByShift:
        """What `preset: auto` makes of a cohort, and what the gate says of it; `summaries` of its scans."""
        found = [
            is_mistaken(summary, self.reference, check(summary, self.reference, self.task))
            for summary in summaries
        ]
        mistaken = sum(found) / max(len(found), 1)
        return by_shift(
            self.space, self.spread, None, images_NCHW, patients_N, self.device, mistaken=mistaken
        )


@dataclass(frozen=True)
class Hospitals:
    """Trains what cells need, each federation once, in `folder`. `method` has fields of FedAvgConfig.

    `foreign` is a set of another modality.
    """

    federation: Federation
    folder: Path
    method: Mapping[str, Any]
    workers: int
    device: str = "cpu"
    foreign: Federation | None = None

    def served(self, site: str, seed: int, rungs: Sequence[str]) -> dict[str, Any]:
        """What `auto` and every dose without a gate do to the global model's Dice, by rung.

        `home` has the global model's Dice on the test patients of each member.
        """
        run = self._run(seed, site)
        trained = Trained.of(run, self.folder / run.id, self.workers)
        found = {rung: self._at_rung(trained, site, seed, rung) for rung in rungs}
        home = {}
        for member in run.sites():
            tested = Scans.load(member.of_split("test"), self.federation.task)
            home[member.name] = short(mean_dice(dice_of(trained.network(), tested)))
        return {"device": self.device, "home": home, "amendment": AMENDMENT, "at": found}

    def by_masks(self, site: str, seed: int, severities: Sequence[int]) -> dict[str, Any]:
        """What masks of a few patients add to the global model (`benchmarks.accuracy.dose.masks`)."""
        run = self._run(seed, site)
        trained = Trained.of(run, self.folder / run.id, self.workers)
        found = by_masks(trained.network(), self.federation, site, seed, severities)
        return {"device": self.device, **found}

    def _at_rung(self, trained: Trained, site: str, seed: int, rung: str) -> dict[str, Any]:
        cases = some_of(self.federation.site(site).cases)
        scans = Scans.load(cases, self.federation.task, rung_of(rung, site, seed))
        hospital = HeldOutHospital.of(scans, seed, MOST_SLICES)
        before = dice_of(trained.network(), hospital.scans)
        arms: dict[str, Dice] = {name: {} for name in ("auto", "by shift", *LADDER)}
        cohorts: list[dict[str, Any]] = []
        planted: list[dict[str, Any]] = []
        for turn in hospital.turns():
            parent = {patient: before[patient] for patient in turn.reported.patients}
            for name, doses in LADDER.items():
                arms[name] |= dice_of(trained.dosed(turn.learned.images, doses), turn.reported)
            made = trained.auto(turn.learned.images, turn.learned.patient_index, _summaries(turn.learned))
            after = dice_of(made.adapted.merged, turn.reported)
            arms["by shift"] |= after
            arms["auto"] |= after if made.passed else parent
            cohorts.append({"slices": len(turn.learned.images), **facts_of(made, change_of(parent, after))})
            if rung in ("0", "3") and not planted:
                planted = [*self._planted(trained, made, turn, parent, seed)]
        return {"arms": arms_of(before, arms), "cohorts": cohorts, "planted": planted}

    def _planted(
        self, trained: Trained, made: ByShift, turn: Turn, parent: Dice, seed: int
    ) -> Iterator[dict[str, Any]]:
        """Candidates that are bad on purpose, and what the gate says of each."""
        images, patients = turn.learned.images, turn.learned.patient_index
        own = _summaries(turn.learned)
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
        wrong = {"noise": (noise, patients, own), "inverted scans": (-images, patients, own)}
        if self.foreign is not None:
            other, summaries = self._foreign
            wrong["another modality"] = (other, list(range(len(other))), summaries)
        for kind, (cohort, owners, summaries) in wrong.items():
            met = trained.auto(cohort, owners, summaries)
            change = change_of(parent, dice_of(met.adapted.merged, turn.reported))
            yield {"kind": f"a cohort of {kind}", **facts_of(met, change)}
            candidate = trained.dosed(cohort, FULL)
            seen = view(candidate, images.to(trained.device), patients=patients)
            judged = replace(made, candidate=seen)
            change = change_of(parent, dice_of(candidate, turn.reported))
            yield {"kind": f"statistics of {kind}", **facts_of(judged, change)}
        for kind, candidate in self._damaged(trained, images, seed):
            failed = _strictly(trained, candidate, turn.learned)
            change = change_of(parent, dice_of(candidate, turn.reported))
            yield {"kind": kind, "failed": failed, "change": short(change)}

    def _damaged(self, trained: Trained, images: Tensor, seed: int) -> Iterator[tuple[str, nn.Module]]:
        generator = torch.Generator().manual_seed(seed)
        good = trained.network()
        yield "shuffled weights", shuffled(good.cpu(), generator).to(trained.device)
        yield "one layer shuffled", shuffled(good, generator, ONE_LAYER).to(trained.device)
        name, network = overdosed_tent(trained.space, images.to(trained.device), seed)
        yield name, network

    @cached_property
    def _foreign(self) -> tuple[Tensor, list[ScanSummary]]:
        """Slices [N, C, H, W] of one site of the other modality, prepared as this task asks for."""
        assert self.foreign is not None
        colour = "luminance" if self.federation.task.channels == 1 else "replicate"
        task = self.federation.task.model_copy(update={"colour": colour})
        cases = self.foreign.sites[0].cases
        some = cases[:: math.ceil(len(cases) / MOST_SLICES)]
        scans = [read_scan(case.image) for case in some]
        prepared = [prepare(scan, task) for scan in scans]
        slices = torch.cat([torch.tensor(each.slices) for each in prepared])
        return slices, [summarise(scan, each) for scan, each in zip(scans, prepared, strict=True)]

    def _run(self, seed: int, leave_out: str) -> Run:
        settings = RunConfig(seed=seed, leave_out=(leave_out,), device=self.device)
        return Run(self.federation, "fedavg", FedAvgConfig(**self.method), settings)


def _summaries(scans: Scans) -> list[ScanSummary]:
    return [scan.summary for scan in scans.scans]


def facts_of(made: ByShift, change: float) -> dict[str, Any]:
    """The shift, the dose, the value of every check and which fail, and the true change."""
    return {
        "shift": short(made.dose.shift),
        "dose": short(made.dose.share),
        "doses": [*map(short, made.dose.doses)],
        "checks": {check.name: _finite(check.value) for check in made.verdict.checks},
        "failed": list(made.failed),
        "change": short(change),
    }


def _finite(value: float | None) -> float | None:
    return short(value) if value is not None and math.isfinite(value) else None


def _strictly(trained: Trained, candidate: nn.Module, learned: Scans) -> list[str]:
    """Checks that a candidate fails at the gate of what is learned or named."""
    images = learned.images.to(trained.device)
    parent = trained.network()
    observed = ObservedRouting(
        candidate=view(candidate, images).maps,
        parent=view(parent, images).maps,
        replicas=(),
        scan_index=learned.patient_index,
        classes=learned.classes,
        source_warnings=0.0,
        statistics_distance=shift_of_statistics(parent.state_dict(), candidate, images),
        references=consensus(trained.space, images),
    )
    return [result.name for result in judge(ROUTING, observed).checks if not result.passed]
