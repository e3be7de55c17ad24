"""The figures of a comparison: each method's mean, worst hospital, cost, and its difference from the first.

A score is of the model that answers a hospital: its own where the method makes one, else its cluster's, else
the one that all share. With one seed it is the mean over hospitals of the mean over their test patients, and
the mean of seeds is over these. A difference is of the same patients: each is the mean over the seeds that
test the patient, and the interval covers patients, drawn within hospitals (`training.paired`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from training.compare.cells import Patients, Row
from training.data.cases import FEW_CASES
from training.paired import Paired, PairedSums, over_sites

Verdict = Literal["better", "worse", "no difference shown", "too few patients"]


@dataclass(frozen=True)
class Hospital:
    """A method's score at a hospital, and the patients that it is of."""

    name: str
    score: float
    patients: int

    @property
    def few(self) -> bool:
        """Whether these are too few."""
        return self.patients < FEW_CASES


@dataclass(frozen=True)
class Difference:
    """A method minus the first one on the same patients: all seeds together, and the mean of each."""

    all: Paired
    by_seed: Mapping[int, float]

    @property
    def few(self) -> bool:
        """Whether it is of too few patients."""
        return self.all.count < FEW_CASES

    @property
    def verdict(self) -> Verdict:
        """The difference in words. The interval covers patients, not trainings: every seed has to agree."""
        if self.few or self.all.low is None:
            return "too few patients"
        direction = self.all.direction
        if not direction or any(change * direction <= 0 for change in self.by_seed.values()):
            return "no difference shown"
        return "better" if direction > 0 else "worse"


@dataclass(frozen=True)
class Line:
    """A method's figures over its finished seeds. Bytes are a hospital's of one seed, as are the seconds.

    `answers` says which of its models answered: own, cluster or global. `difference` is None for the first
    method, and where the two have no patient in common.
    """

    method: str
    answers: str
    rounds: int
    by_seed: Mapping[int, float]
    hospitals: tuple[Hospital, ...]
    difference: Difference | None
    sent: float
    received: float
    seconds: float

    @property
    def score(self) -> float:
        """The mean over seeds."""
        return fmean(self.by_seed.values())

    @property
    def worst(self) -> Hospital:
        """The hospital with the lowest score."""
        return min(self.hospitals, key=lambda each: each.score)

    @property
    def patients(self) -> int:
        """The patients of all hospitals and seeds."""
        return sum(each.patients for each in self.hospitals)

    @property
    def few(self) -> bool:
        """Whether these are too few."""
        return self.patients < FEW_CASES


def lines_of(rows: Iterable[Row], methods: Sequence[str]) -> list[Line]:
    """The figures of the methods that have a finished cell, in their order."""
    finished: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.failure is None:
            finished.setdefault(row.method, {})[row.seed] = row
    first = finished.get(methods[0], {})
    return [
        _line(name, dict(sorted(finished[name].items())), first if name != methods[0] else {})
        for name in methods
        if name in finished
    ]


def _line(name: str, rows: Mapping[int, Row], first: Mapping[int, Row]) -> Line:
    answering = {seed: row.answering for seed, row in rows.items()}
    by_hospital: dict[str, list[float]] = {}
    patients: dict[str, set[str]] = {}
    for found in answering.values():
        for site, score in _by_hospital(found).items():
            by_hospital.setdefault(site, []).append(score)
            patients.setdefault(site, set()).update(_defined(found[site]))
    models = {model for row in rows.values() for model in row.scores}
    own = "own" if "personal" in models else "cluster" if "cluster" in models else "global"
    return Line(
        method=name,
        answers=own,
        rounds=max(row.rounds for row in rows.values()),
        by_seed={seed: fmean(_by_hospital(found).values()) for seed, found in answering.items()},
        hospitals=tuple(
            Hospital(site, fmean(scores), len(patients[site])) for site, scores in sorted(by_hospital.items())
        ),
        difference=_difference({seed: row.answering for seed, row in first.items()}, answering),
        sent=fmean(row.sent for row in rows.values()),
        received=fmean(row.received for row in rows.values()),
        seconds=fmean(row.seconds for row in rows.values()),
    )


def _defined(found: Mapping[str, Sequence[float | None]]) -> dict[str, list[float]]:
    """The scores of the patients that have one."""
    kept = {patient: [s for s in scores if s is not None] for patient, scores in found.items()}
    return {patient: scores for patient, scores in kept.items() if scores}


def _by_hospital(found: Patients) -> dict[str, float]:
    """The mean over all scores of a hospital, as a run's `test_dice` has it."""
    scores = {
        site: [s for own in _defined(patients).values() for s in own] for site, patients in found.items()
    }
    return {site: fmean(own) for site, own in scores.items() if own}


def _difference(first: Mapping[int, Patients], other: Mapping[int, Patients]) -> Difference | None:
    """`other` minus `first`."""
    pairs: dict[str, dict[str, list[tuple[float, float]]]] = {}
    by_seed: dict[int, float] = {}
    for seed in sorted(first.keys() & other.keys()):
        changes = []
        for site in sorted(first[seed].keys() & other[seed].keys()):
            one, two = first[seed][site], other[seed][site]
            common = [patient for patient in one if patient in two]
            found = {patient: pair for patient in common if (pair := _pair(one[patient], two[patient]))}
            for patient, pair in found.items():
                pairs.setdefault(site, {}).setdefault(patient, []).append(pair)
            if found:
                changes.append(fmean(after - before for before, after in found.values()))
        if changes:
            by_seed[seed] = fmean(changes)
    if not pairs:
        return None
    sites = [[_mean(own) for own in by_patient.values()] for by_patient in pairs.values()]
    return Difference(over_sites([PairedSums.of(*zip(*own, strict=True)) for own in sites]), by_seed)


def _pair(one: Sequence[float | None], two: Sequence[float | None]) -> tuple[float, float] | None:
    """The scores of a patient, each the mean of its images; None where none is defined.

    An undefined score is 1 beside a defined one, as in `PairedSums`.
    """
    pairs = [(a, b) for a, b in zip(one, two, strict=True) if a is not None or b is not None]
    return _mean([(1.0 if a is None else a, 1.0 if b is None else b) for a, b in pairs]) if pairs else None


def _mean(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return fmean(before for before, _ in pairs), fmean(after for _, after in pairs)


def in_words(lines: Sequence[Line], methods: Sequence[str], metric: str) -> list[str]:
    """What the figures say, a sentence each: first what differs from the first method, then what does not."""
    first = methods[0]
    if first not in {line.method for line in lines}:
        return [f"{first} has no finished cell, so that there is nothing to compare the others with."]
    said: dict[Verdict, list[str]] = {}
    for line in lines:
        if line.method != first:
            found = line.difference
            verdict: Verdict = found.verdict if found else "too few patients"
            said.setdefault(verdict, []).append(f"{line.method} ({shown(found)})")
    trained = max(len(line.by_seed) for line in lines)
    seeds = "in every seed" if trained > 1 else "of one training each: more seeds say whether it lasts"
    sentences = [
        f"{', '.join(said[verdict])} {'is' if len(said[verdict]) == 1 else 'are'} {verdict} than {first} "
        f"in {metric} on the same patients, {seeds}."
        for verdict in ("better", "worse")
        if verdict in said
    ]
    if level := said.get("no difference shown"):
        sentences.append(f"No difference from {first} can be shown of {', '.join(level)}.")
    if few := said.get("too few patients"):
        sentences.append(
            f"No difference from {first} can be shown of {', '.join(few)}: too few patients, of whom it "
            f"takes {FEW_CASES}, two at each hospital; more seeds test more of them."
        )
    return sentences


def shown(found: Difference | None) -> str:
    """`+0.021 [+0.010, +0.032], n=36`: the difference, its interval and its patients."""
    if found is None:
        return "no patient in common"
    of = found.all
    interval = "" if of.low is None else f" [{of.low:+.3f}, {of.high:+.3f}]"
    return f"{of.change:+.3f}{interval}, n={of.count}"
