"""A part of a table's page: every arm with both metrics, its worst site, its interval and cost; a figure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import Any, ClassVar, TypeAlias

import numpy as np

from benchmarks.harness import scores as tables
from benchmarks.harness.cells import Cell, Row, key
from benchmarks.harness.evaluation import SURFACES
from benchmarks.harness.experiment import Experiment, P
from benchmarks.harness.tables import Interval, mean_and_spread, table
from training.report.charts import Change, forest_chart

MEGABYTE = 1e6
_LEGEND = "[How to read the tables](../../benchmarks/accuracy/papers/README.md#reading-a-page)."
_EMPTY = ("", "–")


@dataclass
class Line:
    """One arm: what the paper prints, and what was found in each seed.

    `ours` has the metric of every patient or image, by seed and (site, name); `paper` has the paper's metric,
    by seed and site; `surfaces` has HD95 and surface Dice as `ours`, of the rows that have them. `bytes` and
    `seconds` are those of one site in the mean, an entry per run.
    """

    published: Mapping[str, float] = field(default_factory=dict)
    ours: dict[int, dict[tuple[str, str], float]] = field(default_factory=dict)
    paper: dict[int, dict[str, float]] = field(default_factory=dict)
    surfaces: dict[str, dict[int, dict[tuple[str, str], float]]] = field(default_factory=dict)
    bytes: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, seed: int, site: str, found: Mapping[str, Any]) -> None:
        """Add what was found at a site."""
        self.ours.setdefault(seed, {}).update(_at(site, found["ours"]))
        self.paper.setdefault(seed, {})[site] = found["paper"]
        for metric in (each for each in SURFACES if each in found):
            self.surfaces.setdefault(metric, {}).setdefault(seed, {}).update(_at(site, found[metric]))

    def add_cost(self, cost: Mapping[str, float], seconds: float = 0.0) -> None:
        """Add the cost of a run, and the seconds of what came after it."""
        self.bytes.append(cost["sent"] + cost["received"])
        self.seconds.append(cost["seconds"] + seconds)


@dataclass(frozen=True)
class Part:
    """A table of a page. `baseline` is the arm that the others are compared with; `columns` are the paper's.

    `published` has every arm, with what the paper prints for it. `metric` and `papers_metric` name the two
    metrics, for the header; `note` stands below the title.
    `surfaces` shows distances of surfaces beside them.
    """

    title: str
    note: str
    rows: Sequence[Row] = field(repr=False)
    published: Mapping[str, Mapping[str, float]]
    baseline: str
    columns: Sequence[str]
    metric: str
    papers_metric: str
    surfaces: bool = False

    @cached_property
    def lines(self) -> Mapping[str, Line]:
        """The arms that have a row, in the order of `published`."""
        lines: dict[str, Line] = {}
        for name, printed in self.published.items():
            for row in (row for row in self.rows if row["cell"]["arm"] == name):
                line, result = lines.setdefault(name, Line(printed)), row["result"]
                for site, found in result["sites"].items():
                    line.add(row["cell"]["seed"], site, found)
                line.add_cost(result["cost"], result.get("seconds", 0.0))
        return lines

    def sections(self, figure: str) -> list[str]:
        """The part in Markdown; `figure` is the file of its figure. Columns without an entry are left out."""
        sites = self._sites
        header = ["arm", f"paper, {'/'.join(self.columns)}", self.metric, "worst site", self.papers_metric]
        header += ["HD95", "surface Dice", "no surface"] if self.surfaces else []
        header += [f"minus {self.baseline}", "MB per site", "seconds per site"]
        body = [
            [
                name,
                "/".join(f"{line.published[c]:.1f}" if c in line.published else "" for c in self.columns),
                _percent(self._means(line.ours)),
                self._worst(line.ours),
                _percent(
                    [float(np.mean([*own.values()])) for own in line.paper.values() if {*own} >= {*sites}]
                ),
                *(self._surfaces(line) if self.surfaces else ()),
                "" if name == self.baseline else self._difference(name),
                f"{fmean(line.bytes) / MEGABYTE:.1f}",
                f"{median(line.seconds):.0f}",
            ]
            for name, line in self.lines.items()
        ]
        kept = [at for at in range(len(header)) if any(line[at].strip("/") not in _EMPTY for line in body)]
        begun = [
            f"{name}, seed {seed}: {', '.join(sorted(own))}"
            for name, line in self.lines.items()
            for seed, own in sorted(line.paper.items())
            if not {*own} >= {*sites}
        ]
        return [
            f"## {self.title}",
            self.note,
            table([header[at] for at in kept], [[line[at].strip("/") for at in kept] for line in body]),
            *([f"In no mean, since not all sites are computed: {'; '.join(begun)}."] if begun else []),
            *([f"![Change of {self.metric} against {self.baseline}]({figure})"] if self.changes else []),
        ]

    def _worst(self, by_seed: tables.BySeed) -> str:
        """The least mean over seeds of a site."""
        whole = self._whole(by_seed)
        if not whole or not self._sites:
            return "–"
        sites = ([tables.site_mean(own, [site]) for own in whole] for site in self._sites)
        return _percent([min(float(np.nanmean(means)) for means in sites)])

    def _surfaces(self, line: Line) -> tuple[str, str, str]:
        """HD95, surface Dice in percent, and the number of patients without either."""
        hd95, nsd = (line.surfaces.get(metric, {}) for metric in SURFACES)
        means = [self._means(found) for found in (hd95, nsd)]
        lacking = sum(math.isnan(value) for own in hd95.values() for value in own.values())
        return mean_and_spread(means[0], 1), _percent(means[1]), f"{lacking}" if hd95 else "–"

    def _means(self, by_seed: tables.BySeed) -> list[float]:
        """The mean of sites of every seed that has all sites."""
        return [tables.site_mean(own, self._sites) for own in self._whole(by_seed)]

    def _whole(self, by_seed: tables.BySeed) -> list[Mapping[tuple[str, str], float]]:
        return [own for own in by_seed.values() if {site for site, _ in own} >= {*self._sites}]

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The change of every arm against the baseline, with its interval."""
        found = self._intervals.items()
        return tuple(Change(name, f.mean, f.low, f.high) for name, f in found if f is not None)

    @property
    def _sites(self) -> list[str]:
        return sorted(
            {site for line in self.lines.values() for found in line.ours.values() for site, _ in found}
        )

    @cached_property
    def _intervals(self) -> Mapping[str, Interval | None]:
        """Every other arm less the baseline; nothing where that has no row."""
        if self.baseline not in self.lines:
            return {}
        base, others = self.lines[self.baseline].ours, [n for n in self.lines if n != self.baseline]
        found = {n: tables.difference_of_sites(self.lines[n].ours, base, self._sites) for n in others}
        return {name: None if each is None else each.interval for name, each in found.items()}

    def _difference(self, name: str) -> str:
        found = self._intervals.get(name)
        return (
            ""
            if found is None
            else f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
        )


# part -> arm -> what the paper prints for it, by column
Published: TypeAlias = Mapping[str, Mapping[str, Mapping[str, float]]]


def published(arms: Mapping[str, Sequence[Any]]) -> Published:
    """What the paper prints, of the arms of every part."""
    return {part: {arm.name: arm.published for arm in own} for part, own in arms.items()}


class PaperTables(Experiment[P]):
    """An experiment of which the page has a `Part` per table. `differs` says what differs from the paper.

    `published`, `notes` and `baselines` have every part; `columns` and both metrics are those of all parts.
    The fields `by` of a cell divide a part further.
    """

    differs: ClassVar[str]
    published: ClassVar[Published]
    notes: ClassVar[Mapping[str, str]]
    baselines: ClassVar[Mapping[str, str]]
    columns: ClassVar[Sequence[str]]
    metric: ClassVar[str]
    papers_metric: ClassVar[str]
    surfaces: ClassVar[bool] = False
    by: ClassVar[Sequence[str]] = ("set",)
    _drawn: tuple[Sequence[Row], Mapping[str, Part]] | None = None

    def parts(self, rows: Sequence[Row]) -> Mapping[str, Part]:
        """The parts that have a row, by a short name for the file of their figure."""
        grouped: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            key = (row["cell"]["part"], *(row["cell"][name] for name in self.by))
            grouped.setdefault(key, []).append(row)
        return {".".join(map(str, key)): self._part(*key, rows=own) for key, own in grouped.items()}

    def prints(self, *place: Any) -> bool:  # noqa: ARG002
        """Whether the paper's figures stand beside this place, which has the values of `by`."""
        return True

    @cached_property
    def _planned(self) -> Mapping[tuple[Any, ...], set[str]]:
        """The arms that the profile has, by part and the values of `by`."""
        found: dict[tuple[Any, ...], set[str]] = {}
        for cell in self.cells():
            found.setdefault((cell["part"], *(cell[name] for name in self.by)), set()).add(cell["arm"])
        return found

    def _part(self, part: str, *place: Any, rows: Sequence[Row]) -> Part:
        there = {row["cell"]["arm"] for row in rows} | self._planned.get((part, *place), set())
        arms = {arm: own for arm, own in self.published[part].items() if arm in there}
        printed = self.prints(*place) and any(arms.values())
        words = (
            f"{value}" if name == "set" else f"{name} {value}"
            for name, value in zip(self.by, place, strict=True)
        )
        return Part(
            ": ".join([part.capitalize(), *([", ".join(words)] if place else [])]),
            self.notes[part],
            rows,
            arms if printed else {arm: {} for arm in arms},
            self.baselines[part],
            self.columns if printed else (),
            self.metric,
            self.papers_metric,
            self.surfaces,
        )

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """What differs from the paper, then every part."""
        found = [self.differs, _LEGEND]
        for name, part in self._parts_of(rows).items():
            # A note that parts share is said once.
            found += [each for each in part.sections(self._file(name)) if each not in found]
        return [*found, *self._not_computed(rows)]

    def lacking(self, rows: Sequence[Row]) -> dict[tuple[str, str | None], list[Cell]]:
        """The cells without a row, by part, or by part and arm where other arms of the part have rows."""
        done = {key(row["cell"]) for row in rows}
        begun = {row["cell"]["part"] for row in rows}
        found: dict[tuple[str, str | None], list[Cell]] = {}
        for cell in self.cells():
            if key(cell) not in done:
                part = cell["part"]
                found.setdefault((part, cell["arm"] if part in begun else None), []).append(cell)
        return found

    def _not_computed(self, rows: Sequence[Row]) -> list[str]:
        """What the profile has and no row, a line per part, with the command that computes it."""
        parts: dict[str, list[tuple[str | None, int]]] = {}
        for (part, arm), cells in self.lacking(rows).items():
            parts.setdefault(part, []).append((arm, len(cells)))
        lines = [
            f"- `--only {shlex.quote(f'part={part}')}`: "
            + "; ".join(f"{arm or 'all arms'} ({count})" for arm, count in found)
            for part, found in parts.items()
        ]
        text = "The command above with the part that is wanted; cells in brackets."
        return ["## Not computed yet", text, "\n".join(lines)] if lines else []

    def figures(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """A figure per part."""
        parts = self._parts_of(rows).items()
        return {
            self._file(name): forest_chart(part.changes, part.metric) for name, part in parts if part.changes
        }

    def _parts_of(self, rows: Sequence[Row]) -> Mapping[str, Part]:
        """The parts, made once for a page and its figures: their intervals take seconds."""
        if self._drawn is None or self._drawn[0] is not rows:
            self._drawn = (rows, self.parts(rows))
        return self._drawn[1]

    def _file(self, name: str) -> str:
        return f"{self.rows_path.stem}.{name}.svg".replace(" ", "-")


def _at(site: str, values: Mapping[str, float | None]) -> dict[tuple[str, str], float]:
    """Values by patient, None as NaN, by site and patient."""
    return {(site, name): math.nan if value is None else value for name, value in values.items()}


def _percent(values: Sequence[float]) -> str:
    return mean_and_spread([100 * value for value in values], 1)
