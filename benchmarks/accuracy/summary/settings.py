"""A setting: what a table of accuracy found on one set, read from its recorded rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from benchmarks.accuracy.dose.report import of_now
from benchmarks.accuracy.papers.report import PaperTables
from benchmarks.harness.cells import Row, Rows
from benchmarks.harness.experiment import RESULTS
from benchmarks.harness.scores import (
    Difference,
    Scores,
    count_patients,
    difference_of_sites,
    site_mean,
    sites_of,
)
from benchmarks.registry import find


@dataclass(frozen=True)
class Setting:
    """One column: every arm of a table on one set.

    `table` is the stem of its page. `unscored` are arms that have a paper's metric alone.
    """

    name: str
    table: str
    baseline: str
    scores: Scores = field(repr=False)
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
    def changes(self) -> dict[str, Difference | None]:
        """Each other arm less the baseline, with sites weighted alike; None where they share no patient."""
        base = self.scores[self.baseline]
        return {
            arm: difference_of_sites(own, base, self.sites)
            for arm, own in self.scores.items()
            if arm != self.baseline
        }


def recorded(table: str) -> list[Row]:
    """The rows of a table."""
    return Rows(RESULTS / f"{table}.jsonl").read()


# Parts of which a paper's own table is the name enough.
_TABLES = ("inside", "outside", "comparison", "ablation")


def of_papers(name: str, part: str, baseline: str) -> Iterator[Setting]:
    """Every part of a paper's tables of which the name begins with `part`, less the given baseline."""
    for table in find(name).tables:
        opened = find(name).of_table(table)
        assert isinstance(opened, PaperTables)
        for short, found in opened.parts(opened.shown(recorded(table.name))).items():
            if not short.startswith(part):
                continue
            scores: Scores = {arm: line.ours for arm, line in found.lines.items() if line.ours}
            where = found.title.partition(": ")[2] or "three organs"
            unscored = tuple(arm for arm in found.lines if arm not in scores)
            if baseline in scores:
                study = found.title.partition(": ")[0].lower()
                own = "" if part in _TABLES or study in where else f", {study}"
                called = f"{where}, {opened.title}{own}"
                yield Setting(called, table.name, baseline, scores, unscored)


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


DOSE = "dose.cpu"


def rows_of_dose() -> list[Row]:
    """Cells of `dose` after the default training; with the dose that is served now, where a set has any."""
    rows = [row for row in recorded(DOSE) if row["cell"]["part"] == "served"]
    rows = [row for row in rows if row["cell"]["training"] == "before"]
    now = {row["cell"]["set"] for row in rows if of_now(row)}
    return [row for row in rows if of_now(row) or row["cell"]["set"] not in now]


def of_dose(rows: Sequence[Row]) -> list[Shift]:
    """Every set and severity of `rows_of_dose`."""
    levels: dict[tuple[str, int], dict[str, list[float]]] = {}
    found: dict[tuple[str, int], dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        cell = row["cell"]
        for rung, at in row["result"]["at"].items():
            if not rung.isdigit():
                continue
            place, site = (cell["set"], int(rung)), cell["site"]
            levels.setdefault(place, {}).setdefault(site, []).append(at["arms"]["global"])
            for arm, each in at["arms"].items():
                if arm not in ("global", "patients"):
                    found.setdefault(place, {}).setdefault(arm, {}).setdefault(site, []).append(each[0])
    return [
        Shift(
            *place,
            fmean(map(fmean, levels[place].values())),
            {arm: {site: fmean(each) for site, each in sites.items()} for arm, sites in arms.items()},
        )
        for place, arms in sorted(found.items())
    ]


LENS = "lens.cpu"
_OF_LENS = ("auto", "lens", "lens then dose", "served")


def rows_of_lens() -> list[Row]:
    """Cells of `lens`, with the arms that the summary shows."""
    rows: list[Row] = []
    for row in recorded(LENS):
        at = {
            rung: {"arms": {arm: each for arm, each in found["arms"].items() if arm in ("global", *_OF_LENS)}}
            for rung, found in row["result"]["at"].items()
        }
        rows.append({**row, "result": {"at": at}})
    return rows


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
    "phantom": Set("a drawn scanner; volumes of 12 to 14 slices", (8,) * 8, (8,) * 8),
    "three organs": Set(
        "the organ and the modality: MRI of bladder and brain, ultrasound",
        (12, 34, 496),
        (264, 506, 647),
    ),
    "pneumoniamnist": Set(
        "the share of each class, drawn by seed; radiographs", (), (443, 438, 2032, 75, 2220)
    ),
    "polyp_centres": Set("the hospital; frames of colonoscopies", (), (500, 500, 500)),
    "wbc5_28_shift": Set(
        "the share of each class, drawn by seed; microscopy, tested on another camera",
        (),
        (72, 68, 21, 63, 108),
    ),
}
