"""A cell of `review`: the federation of the other hospitals trains, and its answers get their signals.

Answers are to the hospital left out, and to what each member held out. Labels are in `dice` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from benchmarks.accuracy.lens.hospital import Cohort, Trained
from benchmarks.accuracy.lens.rungs import AS_THEY_ARE, DRAWN, change_of
from benchmarks.accuracy.outside.hospital import MOST_SLICES, halves
from benchmarks.accuracy.review.answers import (
    Answer,
    Answers,
    agreement_of,
    answered,
    oddness,
    of_patients,
)
from personalization.iop_fl.batch_norm import profile
from personalization.test_time.ladder import blended, dose_by_shift
from training.data.cases import Case, Site
from training.local.data import Data
from training.run import Run

# Patients of a hospital from outside, and of a part of a member, at most.
MOST_OUTSIDE, MOST_OF_PART = 60, 30
SCALE = 10_000
HALF, FULL = (0.5, 0.5, 0.5), (1.0, 1.0, 1.0)
# Added to the seed: drawn scanners of the members' part are others than those of `home`.
_DRAWS = (100, 200)
# Per answer, times SCALE; None where a network has no such number.
Signals: TypeAlias = dict[str, list[int | None]]


@dataclass(frozen=True)
class Turn:
    """The patients that a job sees, and those that are reported."""

    learned: tuple[str, ...]
    reported: tuple[str, ...]


@dataclass(frozen=True)
class Meeting:
    """What a federation published, and its weights with the statistics of each member's scans."""

    trained: Trained
    statistics: tuple[nn.Module, ...]

    @classmethod
    def of(cls, trained: Trained, run: Run) -> Meeting:
        """Measure the statistics, where the network has batch norm."""
        if trained.spread is None:
            return cls(trained, ())
        cohorts = (_prepared(trained, _cases(site, "val"), None) for site in run.sites())
        return cls(trained, tuple(_moved(trained, cohort, FULL) for cohort in cohorts))

    def signals(self, scans: Cohort, turns: Sequence[Turn]) -> Signals:
        """The signals of the answers that the turns report, in their order."""
        network = self.trained.network()
        plain, dosed, halved, passed = answered(network, scans.data), Answers(), Answers(), dict[str, bool]()
        for turn in turns:
            learned, reported = scans.of(turn.learned).thinned(MOST_SLICES), scans.of(turn.reported)
            second, gate = self._second(learned, reported)
            dosed |= second
            passed |= dict.fromkeys(turn.reported, gate)
            if self.trained.spread is not None:
                halved |= answered(_moved(self.trained, learned, HALF), reported.data)
        wanted = [patient for turn in turns for patient in turn.reported]
        members = [answered(each, scans.of(wanted).data) for each in self.statistics]
        rows = []
        for turn in turns:
            for patient in turn.reported:
                row = self._said(plain[patient], of_patients(plain, turn.learned))
                moved = self._said(dosed[patient], of_patients(dosed, turn.learned) or [dosed[patient]])
                row |= {f"dosed {name}": value for name, value in moved.items()}
                row |= {
                    "passed": float(passed[patient]),
                    "R": self._shift(network, scans.of((patient,)).data),
                }
                row["dose"] = self._agreement(plain[patient], dosed[patient])
                row["half"] = self._agreement(plain[patient], halved[patient]) if halved else None
                row["statistics"] = (
                    self._agreement(*(each[patient] for each in members)) if len(members) > 1 else None
                )
                rows.append(row)
        return {name: [scaled(row[name]) for row in rows] for name in rows[0]}

    def _said(self, answer: Answer, cohort: Sequence[Answer]) -> dict[str, float | None]:
        size, pieces = oddness(answer, cohort)
        return {
            "dice": answer.dice,
            "sdc": answer.sdc,
            "empty": float(answer.empty),
            "entropy": answer.entropy,
            "size": size,
            "pieces": pieces,
        }

    def _second(self, learned: Cohort, reported: Cohort) -> tuple[Answers, bool]:
        """The answers by the cohort's dose, or without batch norm through its lens; whether the gate passes
        the dose."""
        auto = self.trained.auto(learned)
        if auto is not None:
            return answered(auto.adapted.merged.eval(), reported.data), auto.passed
        lens = self.trained.lens(learned).lens
        seen = reported.through(lens if lens.steps else None)
        return answered(self.trained.network(), seen.data), False

    def _agreement(self, *answers: Answer) -> float:
        return agreement_of(answers, self.trained.task)

    def _shift(self, network: nn.Module, data: Data) -> float | None:
        """The logarithm of R of one patient's images."""
        if self.trained.spread is None:
            return None
        images = torch.from_numpy(np.array(data.met().images))
        found = profile(network, images, [0] * len(images))
        return math.log(dose_by_shift(found, self.trained.spread).shift)


def at_all(
    meeting: Meeting, run: Run, cases: Sequence[Case], seed: int, rungs: Sequence[str]
) -> dict[str, Any]:
    """The signals of the hospital left out, `cases`, by rung; and of each member by part and rung."""
    (site,) = run.settings.leave_out
    outside, home, members = dict[str, Signals](), dict[str, Any](), dict[str, Any]()
    some = evenly(cases, MOST_OUTSIDE)
    for rung in rungs:
        scans = _prepared(meeting.trained, some, change_of(rung, site, seed))
        first, second = halves(sorted({*scans.data.patients}), seed)
        outside[rung] = meeting.signals(scans, (Turn(first, second), Turn(second, first)))
    for member in run.sites():
        home[member.name], members[member.name] = _inside(meeting, member, seed)
    return {"outside": outside, "home": home, "members": members}


def _inside(meeting: Meeting, member: Site[Any], seed: int) -> tuple[dict[str, Signals], dict[str, Signals]]:
    """The signals of a member's test and of its validation patients, who together are the cohort."""
    parts = {part: _cases(member, part) for part in ("test", "val")}
    cases = [case for own in parts.values() for case in own]
    patients = {part: tuple(sorted({case.patient for case in own})) for part, own in parts.items()}

    def said(part: str, rung: str, draw: int) -> Signals:
        scans = _prepared(meeting.trained, cases, change_of(rung, member.name, draw))
        learned = tuple(sorted({*scans.data.patients}))
        return meeting.signals(scans, (Turn(learned, patients[part]),))

    home = {rung: said("test", rung, seed) for rung in (AS_THEY_ARE, *DRAWN) if patients["test"]}
    members: dict[str, Signals] = {}
    if patients["val"]:
        members[AS_THEY_ARE] = said("val", AS_THEY_ARE, seed)
        for draw in _DRAWS:
            members |= {f"{rung}/{draw}": said("val", rung, seed + draw) for rung in DRAWN}
    return home, members


def _cases(site: Site[Any], part: Any) -> list[Case]:
    return evenly(site.of_split(part), MOST_OF_PART)


def _prepared(trained: Trained, cases: Sequence[Case], change: Any) -> Cohort:
    return Cohort.load(cases, trained.task, trained.reference, change)


def _moved(trained: Trained, cohort: Cohort, doses: tuple[float, float, float]) -> nn.Module:
    """The global model with a dose of the statistics of a cohort."""
    images = torch.from_numpy(np.array(cohort.data.met().images)).to(trained.device)
    return blended(trained.network(), images, doses)


def evenly(cases: Sequence[Case], most: int) -> list[Case]:
    """Cases of at most so many patients, evenly spaced by name."""
    patients = sorted({case.patient for case in cases})
    kept = {*patients[:: max(1, math.ceil(len(patients) / most))]}
    return [case for case in cases if case.patient in kept]


def scaled(value: float | None) -> int | None:
    """As rows have it: a whole number."""
    return None if value is None else round(SCALE * value)
