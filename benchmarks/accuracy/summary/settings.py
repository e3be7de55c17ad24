"""A setting: what a table of accuracy found on one set, read from its recorded rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import Any

from benchmarks.accuracy.cross_organ.arms import FEDAVG
from benchmarks.accuracy.cross_organ.experiment import cells_of as cross_organ_cells
from benchmarks.accuracy.cross_organ.report import comparable
from benchmarks.accuracy.cross_organ.scores import dice_scores
from benchmarks.accuracy.inside.report import scores_of as inside_scores
from benchmarks.accuracy.instance_adaptive.report import scores_of as instance_scores
from benchmarks.accuracy.one_shot.arms import ARMS as ONE_SHOT_ARMS
from benchmarks.accuracy.one_shot.report import setting as one_shot_setting
from benchmarks.accuracy.one_shot.scores import clients, own_answers, own_difference
from benchmarks.accuracy.outside.experiment import adaptation_of
from benchmarks.accuracy.outside.report import changed_settings
from benchmarks.accuracy.outside.scores import GLOBAL
from benchmarks.accuracy.outside.scores import scores_of as outside_scores
from benchmarks.accuracy.papers.report import MEGABYTE, PaperTables
from benchmarks.accuracy.unseen.report import GATE_CHANGED
from benchmarks.harness.cells import Row, Rows, key
from benchmarks.harness.experiment import RESULTS
from benchmarks.harness.scores import (
    FEWEST_SEEDS,
    BySeed,
    Patient,
    Scores,
    add,
    count_patients,
    difference,
    difference_by_seed,
    difference_of_sites,
    site_mean,
    sites_of,
)
from benchmarks.harness.tables import Interval, verdict
from benchmarks.registry import find


@dataclass(frozen=True)
class Cost:
    """What a run cost a site in the mean: megabytes sent and received, and minutes."""

    megabytes: float
    minutes: float


@dataclass(frozen=True)
class Change:
    """An arm's mean less the baseline's, and what may be said of it.

    `word` is `helps`, `harms` or `no difference shown` by the rule of the tables, or why there is none.
    """

    mean: float
    word: str


# (arm, baseline) -> the change, None where they share no patient.
Comparison = Callable[[str, str], Change | None]


@dataclass(frozen=True)
class Setting:
    """One column: every arm of a table on one set.

    `table` is the stem of its page, and `compare` compares as that page does. `unscored` are arms that have
    a paper's metric alone.
    """

    name: str
    table: str
    baseline: str
    scores: Scores = field(repr=False)
    compare: Comparison = field(repr=False)
    costs: Mapping[str, Cost] = field(default_factory=dict)
    unscored: tuple[str, ...] = ()

    @cached_property
    def sites(self) -> list[str]:
        """Sites that are tested."""
        return sites_of(self.scores)

    @property
    def units(self) -> int:
        """Patients or images that are tested."""
        return count_patients(self.scores)

    @property
    def seeds(self) -> int:
        """Seeds of the arm with the most."""
        return max(map(len, self.scores.values()))

    def level(self, arm: str) -> float:
        """Mean over sites of the mean over patients, then over seeds."""
        return fmean(site_mean(found, self.sites) for found in self.scores[arm].values())

    @cached_property
    def changes(self) -> dict[str, Change | None]:
        """Each other arm less the baseline; None where they share no patient."""
        return {arm: self.compare(arm, self.baseline) for arm in self.scores if arm != self.baseline}


def by_patients(scores: Scores) -> Comparison:
    """Over all patients, as most pages have it."""

    def compare(arm: str, baseline: str) -> Change | None:
        first, second = scores[arm], scores[baseline]
        found = difference(first, second, sites_of(scores))
        if found is None:
            return None
        return Change(found.mean, _word(found, difference_by_seed(first, second)))

    return compare


def by_sites(scores: Scores) -> Comparison:
    """With sites weighted alike, and nothing said of too few patients."""
    sites = sites_of(scores)

    def compare(arm: str, baseline: str) -> Change | None:
        found = difference_of_sites(scores[arm], scores[baseline], sites)
        return None if found is None else Change(found.interval.mean, found.verdict)

    return compare


def _word(found: Interval, each: Sequence[float]) -> str:
    return verdict(found, each) if len(each) >= FEWEST_SEEDS else "too few seeds"


def recorded(table: str) -> list[Row]:
    """The rows of a table."""
    return Rows(RESULTS / f"{table}.jsonl").read()


# ---------------------------------------------------------------------- a reader for each experiment


def of_papers(name: str, part: str, baseline: str) -> Iterator[Setting]:
    """Every part of a paper's tables of which the name begins with `part`, less the given baseline."""
    for table in find(name).tables:
        opened = find(name).of_table(table)
        assert isinstance(opened, PaperTables)
        for short, found in opened.parts(opened.shown(recorded(table.name))).items():
            if not short.startswith(part):
                continue
            scores: Scores = {arm: line.ours for arm, line in found.lines.items() if line.ours}
            costs = {
                arm: Cost(fmean(line.bytes) / MEGABYTE, median(line.seconds) / 60)
                for arm, line in found.lines.items()
            }
            where = found.title.partition(": ")[2] or "three organs"
            unscored = tuple(arm for arm in found.lines if arm not in scores)
            if baseline in scores:
                yield Setting(
                    f"{where}, {opened.title}",
                    table.name,
                    baseline,
                    scores,
                    by_sites(scores),
                    costs,
                    unscored,
                )


def of_inside() -> Iterator[Setting]:
    """Members at home, without the tries of other settings."""
    for table in find("inside").tables:
        cells = {key(cell) for cell in find("inside").of_table(table).cells()}
        rows = [row for row in recorded(table.name) if key(row["cell"]) in cells]
        scores = inside_scores(rows)
        recipe = rows[0]["cell"]["method"]["recipe"]
        yield Setting(f"brain_lgg_flair, recipe {recipe}", table.name, "global", scores, by_patients(scores))


def of_outside(mode: str) -> Iterator[Setting]:
    """Every table of `outside` in one of its `MODES`, without the tries of other settings."""
    for table in find("outside").tables:
        profile = find("outside").of_table(table).baseline
        rows = [
            row
            for row in recorded(table.name)
            if not changed_settings(
                adaptation_of(row["cell"]["arms"], row["cell"]["set"], profile), row["cell"]
            )
        ]
        scores = outside_scores(rows, mode)
        name = table.name.removeprefix("outside.").partition(".cpu")[0]
        set_ = rows[0]["cell"]["set"]
        trained = f", {name}" if table.profile not in ("cpu", set_) else ""
        if any(len(scores[arm]) for arm in scores):
            yield Setting(set_ + trained, table.name, GLOBAL, scores, by_patients(scores))


def of_cross_organ(place: str, budget: str = "") -> Iterator[Setting]:
    """Both tables of `cross_organ`, `inside` or `outside` with so many labelled images."""
    for table in find("cross_organ").tables:
        rows = recorded(table.name)
        opened = find("cross_organ").of_table(table)
        cells = cross_organ_cells(table.profile, opened.baseline, rows[-1]["cell"]["patients"])
        scores = dice_scores(comparable(opened.shown(rows), cells), place, budget)
        longer = "" if table.profile == "cpu" else f", {table.profile}"
        for name, sites in _places(scores, place):
            own = {arm: _at(found, sites) for arm, found in scores.items()}
            if FEDAVG in own:
                yield Setting(name + longer, table.name, FEDAVG, own, by_sites(own))


def _places(scores: Scores, place: str) -> list[tuple[str, list[str]]]:
    """The sites together where they are one federation, else one by one."""
    sites = sites_of(scores)
    return [("four organs", sites)] if place == "inside" else [(site, [site]) for site in sites]


def _at(found: BySeed, sites: Sequence[str]) -> dict[int, dict[Patient, float]]:
    own = {
        seed: {unit: value for unit, value in by.items() if unit[0] in sites} for seed, by in found.items()
    }
    return {seed: by for seed, by in own.items() if by}


def of_instance_adaptive(part: str, baseline: str) -> Iterator[Setting]:
    """Every set and number of styles."""
    table = "instance_adaptive.cpu"
    for name, rows in _grouped(recorded(table), _styles).items():
        if rows[0]["cell"]["part"] == part:
            scores = instance_scores(rows)
            yield Setting(name, table, baseline, scores, by_patients(scores))


def _styles(row: Row) -> str:
    cell = row["cell"]
    if "styles" not in cell:
        return str(cell["set"])
    return f"{cell['set']}, {cell['styles']} style{'s' if cell['styles'] > 1 else ''}"


def of_one_shot(baseline: str) -> Iterator[Setting]:
    """Every set and alpha; accuracy at home."""
    table = "one_shot.cpu"
    for name, rows in _grouped(recorded(table), one_shot_setting).items():
        scores: Scores = {}
        for row in rows:
            for arm in ONE_SHOT_ARMS:
                for client in clients(row):
                    images, right = own_answers(row, arm, client)
                    found = {str(image): float(value) for image, value in zip(images, right, strict=True)}
                    add(scores, arm, row["cell"]["seed"], f"client {client}", found)
        yield Setting(name, table, baseline, scores, _by_clients(rows))


def _by_clients(rows: Sequence[Row]) -> Comparison:
    """With clients weighted alike, and images drawn that several seeds share."""

    def compare(arm: str, baseline: str) -> Change:
        found, each = own_difference(rows, arm, baseline)
        return Change(found.mean, _word(found, each))

    return compare


def _grouped(rows: Iterable[Row], name: Any) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


# ---------------------------------------------------------------------- hospitals as units


@dataclass(frozen=True)
class Shift:
    """What each arm changed at the hospitals of a set behind a scanner of some severity.

    `changes` has an arm's mean change of Dice at every hospital, the seeds averaged.
    """

    set: str
    severity: int
    level: float
    changes: Mapping[str, Mapping[str, float]]


UNSEEN = "unseen.cpu"


def of_unseen() -> list[Shift]:
    """Every set and severity of `unseen`, with the recipes that are practised and the others.

    What the gate before served stands apart once today's has judged a seed.
    """
    rows = recorded(UNSEEN)
    today = GATE_CHANGED if any(row["cell"]["seed"] >= GATE_CHANGED for row in rows) else 0
    levels: dict[tuple[str, int], dict[str, list[float]]] = {}
    found: dict[tuple[str, int], dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        cell, result = row["cell"], row["result"]
        before = "" if cell["seed"] >= today else ", the gate before"
        if cell["part"] == "served":
            by_severity = {severity: at["arms"] for severity, at in result["at"].items()}
        elif cell["part"] == "learned":
            by_severity = result
        else:
            continue
        for severity, arms in by_severity.items():
            place = (cell["set"], int(severity))
            if cell["part"] == "served":
                levels.setdefault(place, {}).setdefault(cell["site"], []).append(arms["global"])
            shuffled = [each[0] for arm, each in arms.items() if arm.startswith("shuffled ")]
            changes = {
                f"auto{before}" if arm == "auto" else arm: each[0]
                for arm, each in arms.items()
                if arm not in ("global", "patients") and not arm.startswith("shuffled")
            }
            if shuffled:
                changes["auto, playbook with shuffled features" + before] = fmean(shuffled)
            for arm, change in changes.items():
                own = found.setdefault(place, {}).setdefault(arm, {})
                own.setdefault(cell["site"], []).append(change)
    return [
        Shift(
            set_,
            severity,
            fmean(map(fmean, levels[set_, severity].values())),
            {arm: {site: fmean(v) for site, v in sites.items()} for arm, sites in arms.items()},
        )
        for (set_, severity), arms in sorted(found.items(), key=lambda item: (item[0][0], item[0][1]))
    ]


def of_members() -> list[Shift]:
    """Every set of `unseen`: what members are served by default, and their personal models."""
    scores: dict[str, dict[str, list[Mapping[str, float]]]] = {}
    for row in recorded(UNSEEN):
        if row["cell"]["part"] == "inside":
            for member, found in row["result"].items():
                scores.setdefault(row["cell"]["set"], {}).setdefault(member, []).append(found)
    return [
        Shift(
            set_,
            0,
            fmean(fmean(each["global"] for each in own) for own in members.values()),
            {
                arm: {
                    member: fmean(each[arm] - each["global"] for each in own)
                    for member, own in members.items()
                }
                for arm in ("auto", "personal")
            },
        )
        for set_, members in sorted(scores.items())
    ]


# ---------------------------------------------------------------------- the sets


@dataclass(frozen=True)
class Set:
    """What differs between a set's sites, and every site's patients and images with a mask or a class.

    `patients` is empty where the set does not name them.
    """

    shift: str
    patients: tuple[int, ...]
    images: tuple[int, ...]


SETS: Mapping[str, Set] = {
    "brain_lgg_flair": Set("the institution; MRI", (16, 26, 14, 34), (169, 479, 260, 506)),
    "retina_vessels": Set("the camera; photographs of the fundus", (14, 40, 20, 16), (28, 40, 20, 16)),
    "lungs_cxr": Set("the hospital, of three countries; radiographs", (247, 138, 566), (247, 138, 566)),
    "phantom": Set("a drawn scanner; volumes of 12 to 14 slices, 4 sites in `outside`", (8,) * 8, (8,) * 8),
    "wbc_cells": Set("the stain and the camera; microscopy", (), (300, 100)),
    "four organs": Set(
        "the organ and the modality: MRI of bladder and brain, ultrasound, dermoscopy",
        (12, 34, 496, 200),
        (264, 506, 647, 200),
    ),
    "brain_mri_t1ce": Set("another contrast than any member's", (15,), (64,)),
    "breast_dce_mri": Set("another organ than any member's", (4,), (25,)),
    "pneumoniamnist": Set(
        "the share of each class, drawn by seed; radiographs", (), (443, 438, 2032, 75, 2220)
    ),
    "wbc5_28_shift": Set(
        "the share of each class, drawn by seed; microscopy, tested on another camera",
        (),
        (72, 68, 21, 63, 108),
    ),
}
