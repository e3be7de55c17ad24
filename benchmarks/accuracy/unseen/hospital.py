"""A cell of `unseen`: the federation of the other hospitals trains, and meets the one that is left out.

The hospital's patients are halved. Each half is the cohort of a job in turn, and the other half is scored, as
a hospital would be served after it. Labels are for reporting only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.accuracy.unseen.official import NO_LIMITS, TargetSlices, by_official_protocol
from benchmarks.accuracy.unseen.scanner import SEVERITIES, ShiftedScanner
from benchmarks.harness.evaluation import BATCH, Scans, mean_dice, predict
from benchmarks.harness.scores import pair
from personalization.iop_fl.network import route
from personalization.iop_fl.space import GLOBAL, RoutingSpace
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import adapt, recipe_of
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.cases import Case, Federation
from training.local.networks import network_of
from training.methods.iop_fl import IopFlConfig
from training.run import Run, execute

CPU = torch.device("cpu")
# A hospital's patients who take part at most, evenly spaced by name.
MOST_PATIENTS = 200
# Slices of a cohort, about.
MOST_SLICES = 128
# Of planted candidates: what their rate is multiplied by, and a layer in the middle, since the harm of one is
# less plain than that of all.
RATE_FACTOR = 100
ONE_LAYER = "bottleneck.bottleneck_conv1"
Dice: TypeAlias = dict[str, float]


def halves(patients: Sequence[str], seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Two disjoint halves of the patients, drawn from the seed; the first is the larger of an odd number."""
    order = torch.randperm(len(patients), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn = [sorted(patients)[i] for i in order]
    middle = (len(drawn) + 1) // 2
    return tuple(sorted(drawn[:middle])), tuple(sorted(drawn[middle:]))


@dataclass(frozen=True)
class Turn:
    """What is learned from, and what is reported."""

    learned: Scans
    reported: Scans


@dataclass(frozen=True)
class HeldOutHospital:
    """The site left out: all its scans, and the halves of its patients for the inductive comparison.

    At most about `most` slices are learned from at a time; all are reported.
    """

    scans: Scans
    halves: tuple[Scans, Scans]
    most: int

    @classmethod
    def of(cls, scans: Scans, seed: int, most: int) -> HeldOutHospital:
        """Halves drawn from the seed."""
        first, second = halves(scans.patients, seed)
        return cls(scans, (scans.of(first), scans.of(second)), most)

    def whole(self) -> Turn:
        """Transductive: learned from all patients, who are reported."""
        return Turn(self.scans.thinned(self.most), self.scans)

    def turns(self) -> tuple[Turn, Turn]:
        """Inductive: each half to learn from, with the other to report."""
        first, second = self.halves
        return Turn(first.thinned(self.most), second), Turn(second.thinned(self.most), first)


@dataclass(frozen=True)
class Hospitals:
    """Trains what cells need, each federation once, in `folder`. `method` has fields of IopFlConfig."""

    federation: Federation
    folder: Path
    method: Mapping[str, Any]
    workers: int

    def inside(self, seed: int) -> dict[str, Any]:
        """Dice on the members' own test patients, of the global model and of what `auto` serves them."""
        run = self._run(seed, ())
        result = execute(run, self._place(run), workers=self.workers, resume=True)
        drafts = {draft.site or GLOBAL: draft for draft in result.publication.models}
        found = {}
        for site in run.sites():
            scans = Scans.load(site.of_split("test"), run.federation.task)
            dice = {
                name: scans.dice(predict(network_of(draft.network, draft.weights, CPU), scans.images))
                for name, draft in drafts.items()
                if name in (GLOBAL, site.name)
            }
            metrics = drafts[site.name].metrics if site.name in drafts else {}
            won = metrics.get("val_dice", 0.0) > metrics.get("val_dice_global", 0.0)
            found[site.name] = {
                "global": short(mean_dice(dice[GLOBAL])),
                "personal": short(mean_dice(dice.get(site.name, dice[GLOBAL]))),
                "auto": short(mean_dice(dice[site.name if won else GLOBAL])),
                "share": result.publication.details["personal"][site.name]["share"],
                "patients": len(dice[GLOBAL]),
            }
        return found

    def paper(self, site: str, seed: int, severities: Sequence[int] = SEVERITIES) -> dict[str, Any]:
        """Dice of the global model as it was trained before, with the paper's recipe, per severity."""
        fields = {name: self.method[name] for name in self.method if name in FedAvgConfig.model_fields}
        run = replace(
            self._run(seed, (site,)),
            method="fedavg",
            config=FedAvgConfig(**{**fields, "recipe": "paper"}),
        )
        network = self._global(run)
        scans = {severity: self._hospital(site, seed, severity).scans for severity in severities}
        return {str(key): short(mean_dice(dice_of(network, each))) for key, each in scans.items()}

    def reference(self, site: str, seed: int) -> dict[str, Any]:
        """Dice on the hospital's test patients, of the others' global model and of one trained at home."""
        others = self._run(seed, (site,))
        alone = self._run(seed, tuple(name for name in self.federation.names if name != site))
        fields = {name: self.method[name] for name in self.method if name in FedAvgConfig.model_fields}
        alone = replace(alone, method="fedavg", config=FedAvgConfig(**fields))
        tested = next(each for each in alone.sites() if each.name == site).of_split("test")
        scans = Scans.load(tested, alone.federation.task)
        space = space_of(others, self._place(others), self.workers)
        return {
            "global": short(mean_dice(dice_of(space.plain(), scans))),
            "home": short(mean_dice(dice_of(self._global(alone), scans))),
            "patients": len(scans.patients),
        }

    def learned(
        self, site: str, seed: int, presets: Sequence[str], severities: Sequence[int]
    ) -> dict[str, Any]:
        """Dice of the presets as they come, beside the global model's."""
        run = self._run(seed, (site,))
        space = space_of(run, self._place(run), self.workers)
        found = {}
        for severity in severities:
            hospital = self._hospital(site, seed, severity)
            before = dice_of(space.plain(), hospital.scans)
            arms: dict[str, Dice] = {preset: {} for preset in presets}
            for turn in hospital.turns():
                for preset in presets:
                    config = AdaptationConfig(preset=preset, seed=seed)
                    adapted = recipe_of(preset).adapt(space, turn.learned.images, config, CPU)
                    arms[preset] |= dice_of(adapted.merged, turn.reported)
            arms["intent"] = _scan_by_scan(space, hospital.scans)
            found[str(severity)] = arms_of(before, arms)
        return found

    def official(self, site: str, seed: int) -> dict[str, Any]:
        """Scores of preset `official` by the published code's protocol (see `by_official_protocol`).

        `locum` has the global model's mean foreground Dice per patient over all scans, and how the same
        candidate changes it, merged with the statistics of scans that no label chose.
        """
        run = self._run(seed, (site,))
        space = space_of(run, self._place(run), self.workers)
        hospital = self._hospital(site, seed, 0)
        cases = some_of(self.federation.site(site).cases)
        slices = TargetSlices.of(cases, hospital.scans, self.federation.task)
        found = by_official_protocol(space, slices, seed)
        before = dice_of(space.plain(), hospital.scans)
        after = dice_of(found.merged(space, hospital.whole().learned.images), hospital.scans)
        return found.row | {"locum": [short(mean_dice(before)), short(change_of(before, after))]}

    def others(self, site: str, seed: int) -> nn.Module:
        """The global model of the other hospitals."""
        run = self._run(seed, (site,))
        return space_of(run, self._place(run), self.workers).plain().eval()

    def _run(self, seed: int, leave_out: tuple[str, ...]) -> Run:
        settings = RunConfig(seed=seed, leave_out=leave_out, consent="all")
        return Run(self.federation, "iop-fl", IopFlConfig(**self.method), settings)

    def _place(self, run: Run) -> Path:
        return self.folder / run.id

    def _global(self, run: Run) -> nn.Module:
        result = execute(run, self._place(run), workers=self.workers, resume=True)
        draft = next(draft for draft in result.publication.models if draft.site is None)
        return network_of(draft.network, draft.weights, CPU)

    def _hospital(self, site: str, seed: int, severity: int) -> HeldOutHospital:
        cases = some_of(self.federation.site(site).cases)
        change = ShiftedScanner.of(site, seed).at(severity)
        scans = Scans.load(cases, self.federation.task, change)
        return HeldOutHospital.of(scans, seed, MOST_SLICES)


def space_of(run: Run, folder: Path, workers: int) -> RoutingSpace:
    """The models that a run publishes."""
    models = execute(run, folder, workers=workers, resume=True).publication.models
    states = {draft.site or GLOBAL: draft.weights for draft in models}
    network = models[0].network
    inside = {name: state for name, state in states.items() if name != GLOBAL}
    return RoutingSpace.of(network.name, network.arguments, inside, states[GLOBAL])


def some_of(cases: Sequence[Case]) -> list[Case]:
    """Cases of at most `MOST_PATIENTS` patients, evenly spaced by name."""
    patients = sorted({case.patient for case in cases})
    kept = set(patients[:: math.ceil(len(patients) / MOST_PATIENTS)])
    return [case for case in cases if case.patient in kept]


def overdosed_tent(space: RoutingSpace, images: Tensor, seed: int) -> tuple[str, nn.Module]:
    """Tent at a hundred times its rate on the first images, and what it is called."""
    config = AdaptationConfig(preset="tent", seed=seed)
    config = config.model_copy(update={"bn_rate": RATE_FACTOR * config.bn_rate, "epochs": 2})
    few = images[: 2 * BATCH]
    network = route(space.alone()).to(images.device)
    adapt(network, few, config, limits=NO_LIMITS)
    merged = recipe_of("tent").merged(space.alone(), network, few, config, _never)
    return f"Tent, rate x{RATE_FACTOR}", merged


def shuffled(network: nn.Module, generator: torch.Generator, only: str = "") -> nn.Module:
    """A copy with the weights of its convolutions, or of one of them, in random order."""
    changed = copy.deepcopy(network)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if parameter.ndim == 4 and name.startswith(only):
                order = torch.randperm(parameter.numel(), generator=generator)
                parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return changed


def _never() -> None:
    pass


def _scan_by_scan(space: RoutingSpace, scans: Scans) -> Dice:
    """InTEnt, which adapts to each scan by itself: all slices of a patient."""
    config = AdaptationConfig(preset="intent")
    dice: Dice = {}
    for patient in scans.patients:
        own = scans.of([patient])
        network = recipe_of("intent").adapt(space, own.images, config, CPU).merged
        with torch.no_grad():
            dice |= own.dice(torch.softmax(network(own.images), dim=1))
    return dice


def dice_of(network: nn.Module, scans: Scans) -> Dice:
    """Foreground Dice of every patient."""
    return scans.dice(predict(network, scans.images))


def changes_of(before: Dice, after: Dice) -> list[float]:
    """The change of every patient in `after` with a defined Dice."""
    pairs = [pair(before[patient], after[patient]) for patient in after]
    return [second - first for first, second in pairs if math.isfinite(first)]


def change_of(before: Dice, after: Dice) -> float:
    """The mean change of the patients in `after`; 0 of none."""
    changes = changes_of(before, after)
    return math.fsum(changes) / len(changes) if changes else 0.0


def arms_of(before: Dice, arms: Mapping[str, Dice]) -> dict[str, Any]:
    """The global model's mean Dice; of each arm the mean change, its deviation over patients, and the share
    of them who lose more than a point."""
    found: dict[str, Any] = {"global": short(mean_dice(before)), "patients": len(before)}
    for name, after in arms.items():
        changes = np.array(changes_of(before, after))
        harmed = float(np.mean(changes < -0.01))
        found[name] = [short(float(changes.mean())), short(float(changes.std())), short(harmed)]
    return found


def short(value: float) -> float:
    """Rounded as rows have it."""
    return round(float(value), 5)
