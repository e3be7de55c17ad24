"""A cell of `lens`: the federation of the other hospitals trains, and meets the one that is left out.

The hospital's patients are halved. Each half is the cohort of a job in turn, and the other half is scored as
the service answers it. Labels are for reporting only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import nn

from benchmarks.accuracy.lens.rungs import AS_THEY_ARE, Change, change_of
from benchmarks.accuracy.outside.hospital import MOST_SLICES, changes_of, halves, short, some_of
from model_store.guard import ReferenceStatistics, check, summarise
from model_store.lens import FINGERPRINT, STEPS, Fingerprint, Fitted, Lens, LensForScan, Step, fit
from model_store.task import Task
from personalization.dose import ByShift, Lensed, by_lens, by_lens_alone, by_shift, view
from personalization.gate import GateVerdict, ThroughLens
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import FILE, Spread
from training.data.cases import Federation
from training.local.data import Data
from training.local.registry import kind_of
from training.local.scores import dice_per_patient, recall_by_class
from training.run import Run, execute

# Of patients; of a classification, of classes: the share that is recognised.
Scores: TypeAlias = dict[str, float]
Images: TypeAlias = NDArray[np.float32]

# Deviation of the smooth noise that is planted, in pixels.
_SMOOTH = 6.0
PLANTED_AT = (AS_THEY_ARE, "3")


@dataclass(frozen=True)
class Cohort:
    """A hospital's scans, prepared, and whether each is of another kind than those of training."""

    data: Data
    mistaken: Mapping[str, bool]

    @classmethod
    def load(
        cls, cases: Sequence[Any], task: Task, reference: ReferenceStatistics | None, change: Change | None
    ) -> Cohort:
        """Decode, change and prepare."""
        kind, parts, mistaken = kind_of(task), [], {}
        read = kind.reader(task)
        for case in cases:
            scan = read(case)
            scan = change(scan) if change else scan
            examples, prepared = kind.of_case(case, scan, task)
            warnings = check(summarise(scan, prepared), reference, task)
            mistaken[case.name] = any(warning.gross for warning in warnings)
            parts.append(examples)
        return cls(kind.joined(parts, task), mistaken)

    def of(self, patients: Collection[str]) -> Cohort:
        """The scans of some patients."""
        kept = [index for index, patient in enumerate(self.data.patients) if patient in patients]
        return replace(self, data=self.data.take(kept))

    def thinned(self, most: int) -> Cohort:
        """Evenly spaced scans with about `most` slices at most."""
        names = list(dict.fromkeys(self.data.cases))
        some = {*names[:: math.ceil(len(self.data) / most)]}
        return replace(
            self, data=self.data.take([i for i, name in enumerate(self.data.cases) if name in some])
        )

    @property
    def share_mistaken(self) -> float:
        """Share of the scans; a scan that was not compared with those of training is none."""
        return float(np.mean([self.mistaken.get(name, False) for name in {*self.data.cases}]))

    def through(self, lens: Lens | None) -> Cohort:
        """The scans as the lens shows them."""
        return self if lens is None else replace(self, data=self.data.changed_by(lens.apply))


@dataclass(frozen=True)
class Trained:
    """What a federation published."""

    space: RoutingSpace
    spread: Spread | None
    fingerprint: Fingerprint
    reference: ReferenceStatistics | None
    task: Task
    device: torch.device

    @classmethod
    def of(cls, run: Run, folder: Path, workers: int) -> Trained:
        """Train the federation, or read it where it was trained before."""
        publication = execute(run, folder, workers=workers, resume=True).publication
        draft = next(each for each in publication.models if each.site is None)
        space = RoutingSpace.of(draft.network.name, draft.network.arguments, {}, draft.weights)
        spread = publication.files.get(FILE)
        return cls(
            space,
            None if spread is None else Spread.model_validate_json(spread),
            Fingerprint.model_validate_json(publication.files[FINGERPRINT]),
            publication.statistics,
            run.federation.task,
            torch.device(run.settings.device),
        )

    def network(self) -> nn.Module:
        """A copy of the global model."""
        return self.space.plain().to(self.device).eval()

    def lens(self, cohort: Cohort, steps: Collection[Step] = STEPS) -> Fitted:
        """The lens of a cohort."""
        made = fit(cohort.data.viewed, self.fingerprint, steps)
        assert made is not None
        return made

    def auto(self, cohort: Cohort) -> ByShift | None:
        """The dose by shift of today, None without batch norm to move."""
        if self.spread is None:
            return None
        met = cohort.data.met()
        images = torch.from_numpy(np.array(met.images))
        return by_shift(
            self.space, self.spread, None, images, met.patients, self.device, mistaken=cohort.share_mistaken
        )

    def scan_by_scan(self, data: Data) -> Scores:
        """What `personalization=scan` answers: each patient's images through a lens of their own, then by the
        dose that their shift asks for, where the network has batch norm."""
        asked, scores = LensForScan(self.fingerprint), Scores()
        for patient in dict.fromkeys(data.patients):
            own = data.take([index for index, each in enumerate(data.patients) if each == patient])
            lens = asked.of_images(np.concatenate([images for _, images in own.viewed()])).lens
            seen = own if lens is None else own.changed_by(lens.apply)
            dosed = self.auto(Cohort(seen, {}))
            scores |= scores_of(self.network() if dosed is None else dosed.adapted.merged, seen)
        return scores

    def served(self, cohort: Cohort, made: Fitted) -> Lensed:
        """What is served of a lens to a cohort."""
        met = cohort.data.met()
        images = torch.from_numpy(np.array(met.images))
        lensed = None
        if made.lens.steps:
            lensed = torch.from_numpy(np.array(cohort.data.changed_by(made.lens.apply).met().images))
        seen = ThroughLens(made.left, None, made.grid, made.sides, made.lens.negated)
        rest = images, lensed, met.patients, seen
        if self.spread is not None:
            return by_lens(self.space, self.spread, None, *rest, self.device, mistaken=cohort.share_mistaken)
        network = self.network()
        classes = int(self.space.arguments["classes"])
        return by_lens_alone(partial(view, network), classes, *rest, mistaken=cohort.share_mistaken)


@dataclass(frozen=True)
class Hospitals:
    """Meets the hospitals of a set, each with the federation of the others. `run` trains without a site.

    `foreign` has scans of another modality, prepared for the task.
    """

    federation: Federation[Any]
    run: Callable[[str, int], Run]
    folder: Path
    workers: int
    foreign: Callable[[Task], Cohort] | None = None

    def served(self, site: str, seed: int, rungs: Sequence[str], *, ablation: bool) -> dict[str, Any]:
        """What the arms change of the global model's score, by rung."""
        run = self.run(site, seed)
        trained = Trained.of(run, self.folder / run.id, self.workers)
        found = {rung: self._at(trained, site, seed, rung, ablation=ablation) for rung in rungs}
        return {"device": run.settings.device, "own": self._own(trained, run), "at": found}

    def _own(self, trained: Trained, run: Run) -> dict[str, dict[str, float]]:
        """R of each kind of the scans that each member held out of its measure."""
        found = {}
        for member in run.sites():
            cases = [case for split in ("val", "test") for case in member.of_split(split)]
            if cases:
                cohort = Cohort.load(cases, trained.task, trained.reference, None)
                before = trained.lens(cohort, ()).before
                found[member.name] = {str(kind): short(shift) for kind, shift in before.items()}
        return found

    def _at(self, trained: Trained, site: str, seed: int, rung: str, *, ablation: bool) -> dict[str, Any]:
        cases = some_of(self.federation.site(site).cases)
        scans = Cohort.load(cases, trained.task, trained.reference, change_of(rung, site, seed))
        parts = halves(sorted({*scans.data.patients}), seed)
        arms: dict[str, list[Scores]] = {}
        before: list[Scores] = []
        cohorts: list[dict[str, Any]] = []
        planted: list[dict[str, Any]] = []
        for own, other in (parts, parts[::-1]):
            learned, reported = scans.of(own).thinned(MOST_SLICES), scans.of(other)
            parent = scores_of(trained.network(), reported.data)
            before.append(parent)
            made, facts = self._turn(trained, learned, reported, parent, ablation=ablation)
            for name, scores in made.items():
                arms.setdefault(name, []).append(scores)
            cohorts.append(facts)
            if rung in PLANTED_AT and not planted:
                planted = [*self._planted(trained, learned, reported, parent, seed)]
        return {"arms": arms_of(before, arms), "cohorts": cohorts, "planted": planted}

    def _turn(
        self, trained: Trained, learned: Cohort, reported: Cohort, parent: Scores, *, ablation: bool
    ) -> tuple[dict[str, Scores], dict[str, Any]]:
        network = trained.network()
        made = trained.lens(learned)
        served = trained.served(learned, made)
        auto = trained.auto(learned)
        seen = reported.through(made.lens if made.lens.steps else None)
        arms: dict[str, Scores] = {}
        if auto is not None:
            arms["dose"] = scores_of(auto.adapted.merged, reported.data) if auto.dose.share else parent
            arms["auto"] = arms["dose"] if auto.passed else parent
        arms["lens"] = scores_of(network, seen.data) if made.lens.steps else parent
        dosed = trained.auto(learned.through(made.lens)) if made.lens.steps else auto
        if dosed is not None:
            moved = dosed.dose.share > 0
            arms["lens then dose"] = scores_of(dosed.adapted.merged, seen.data) if moved else arms["lens"]
        by_name = {
            "nothing": parent,
            "lens": arms["lens"],
            "dose": arms.get("dose", parent),
            "lens and dose": arms.get("lens then dose", arms["lens"]),
        }
        arms["served"] = by_name[served.served]
        if reported.data.dense:
            arms["each scan"] = trained.scan_by_scan(reported.data)
        if ablation:
            for step in STEPS:
                others = tuple(each for each in STEPS if each != step)
                for name, steps in ((f"only {step}", (step,)), (f"without {step}", others)):
                    arms[name] = self._by(trained, learned, reported, parent, steps)
        level = mean(parent)
        facts = {
            "slices": len(learned.data),
            **facts_of(made),
            "served": served.served,
            "lens gate": gate_of(served.verdict),
            "both gate": gate_of(served.both),
            "network": None if served.shifts is None else [*map(short, served.shifts)],
            "dose": None
            if auto is None
            else [short(auto.dose.shift), short(auto.dose.share), list(auto.failed)],
            "change": {name: short(mean(scores) - level) for name, scores in arms.items()},
        }
        return arms, facts

    def _by(
        self, trained: Trained, learned: Cohort, reported: Cohort, parent: Scores, steps: Collection[Step]
    ) -> Scores:
        lens = trained.lens(learned, steps).lens
        return scores_of(trained.network(), reported.through(lens).data) if lens.steps else parent

    def _planted(
        self, trained: Trained, learned: Cohort, reported: Cohort, parent: Scores, seed: int
    ) -> Iterator[dict[str, Any]]:
        """Cohorts that a lens must not be served to, and lenses of them at the hospital's own scans."""
        for kind, cohort in self._wrong(trained, learned, seed):
            made = trained.lens(cohort)
            served = trained.served(cohort, made)
            shown = reported.through(made.lens if made.lens.steps else None)
            seen = shown if served.sees_through else reported
            change = mean(scores_of(served.network or trained.network(), seen.data)) - mean(parent)
            nothing = served.candidate == "nothing"
            row = {**facts_of(made), "served": served.served, "lens gate": gate_of(served.verdict)}
            yield {"kind": f"a cohort of {kind}", **row, "change": short(0.0 if nothing else change)}
            mixed = _mixed(trained, learned, made)
            judged = trained.served(learned, mixed)
            yield {
                "kind": f"a lens of {kind}",
                **facts_of(mixed),
                "served": judged.served,
                "lens gate": gate_of(judged.verdict),
                "change": short(mean(scores_of(trained.network(), shown.data)) - mean(parent)),
            }

    def _wrong(self, trained: Trained, learned: Cohort, seed: int) -> Iterator[tuple[str, Cohort]]:
        generator = np.random.default_rng(seed)

        def noise(images: Images) -> Images:
            found: Images = generator.standard_normal(images.shape).astype(np.float32)
            return found

        def smooth(images: Images) -> Images:
            width = (0, 0, *(_SMOOTH,) * (images.ndim - 2))
            found: Images = ndimage.gaussian_filter(noise(images), width)
            axes = tuple(range(1, images.ndim))
            found -= found.mean(axis=axes, keepdims=True)
            found /= found.std(axis=axes, keepdims=True)
            return found

        for kind, drawn in (("noise", noise), ("smooth noise", smooth)):
            yield kind, replace(learned, data=learned.data.changed_by(drawn))
        if self.foreign is not None:
            yield "another modality", self.foreign(trained.task)


def _mixed(trained: Trained, learned: Cohort, made: Fitted) -> Fitted:
    """Another cohort's lens, with what its fit would say at the hospital's own scans."""
    steps: tuple[Step, ...] = ("polarity",)
    own = trained.lens(learned, steps)
    seen = learned.data.changed_by(made.lens.apply) if made.lens.steps else learned.data
    left = fit(seen.viewed, trained.fingerprint, ())
    assert left is not None
    return replace(made, before=own.before, after=left.before, polarity=own.polarity)


def scores_of(network: nn.Module, data: Data) -> Scores:
    """Dice of every patient; of a classification the share of each class that is recognised."""
    if data.dense:
        return dice_per_patient(network, data, _classes(data))
    return recall_by_class(network, data)


def _classes(data: Data) -> int:
    task: Task = cast(Any, data).task
    return len(task.classes)


def mean(scores: Scores) -> float:
    """Mean over the patients who have a target, or the classes."""
    defined = [score for score in scores.values() if math.isfinite(score)]
    return math.fsum(defined) / len(defined) if defined else math.nan


def arms_of(before: Sequence[Scores], arms: Mapping[str, Sequence[Scores]]) -> dict[str, Any]:
    """The global model's mean score; of each arm the mean change, its deviation over patients, and the share
    of them who lose more than a point. `best` is the best arm of each half by label."""
    parent = {f"{half}/{name}": score for half, scores in enumerate(before) for name, score in scores.items()}
    found: dict[str, Any] = {"global": short(mean(parent)), "patients": len(parent)}
    best = [
        max(
            [own, *(made[half] for name, made in arms.items() if " " not in name or "then" in name)], key=mean
        )
        for half, own in enumerate(before)
    ]
    for name, made in {**arms, "best": best}.items():
        after = {f"{half}/{key}": score for half, scores in enumerate(made) for key, score in scores.items()}
        changes = np.array(changes_of(parent, after))
        found[name] = [short(changes.mean()), short(changes.std()), short((changes < -0.01).mean())]
    return found


def facts_of(made: Fitted) -> dict[str, Any]:
    """What a lens was made by."""
    polarity = made.polarity
    return {
        "steps": [*made.lens.steps],
        "before": {kind: short(shift) for kind, shift in made.before.items()},
        "after": {kind: short(shift) for kind, shift in made.after.items()},
        "shares": {kind: short(share) for kind, share in made.shares.items()},
        "polarity": None if polarity is None else [short(polarity.correlation), short(polarity.nearer)],
    }


def gate_of(verdict: GateVerdict | None) -> dict[str, Any] | None:
    """The values of the checks, and which fail."""
    if verdict is None:
        return None
    values = {check.name: None if check.value is None else short(check.value) for check in verdict.checks}
    return {"failed": [each.name for each in verdict.checks if not each.passed], "values": values}
