"""A part of a table's page: every arm with both metrics, its interval and its cost; a figure; every site."""

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
_MINUS = (
    "*minus*: in points, over patients or images that both arms have, with sites weighted alike as in the "
    "means. A patient without a target counts 1 where one arm finds none and the other does; the means leave "
    "the patient out where none is found. Fewer seeds of an arm are compared with the same seeds alone."
)
_SURFACES = (
    "*HD95* and *surface Dice* (normalised, at a tolerance of 1): in millimetres where a scan has its "
    "spacing, else in pixels of the scan, as of all shared images. Per patient, means of sites, without "
    "patients of whom no scan has a surface both in answer and mask: these are counted under *no surface*, "
    "and an arm that finds less has more of them. A dash is an arm that was run before both were measured."
)
_SECONDS = (
    "Seconds are wall-clock, the median over runs, of one thread on a machine with other work: they tell the "
    "order of magnitude."
)


@dataclass
class Line:
    """One arm: what the paper prints, and what was found in each seed.

    `ours` has the metric of every patient or image, by seed and (site, name); `paper` has the paper's metric,
    by seed and site; `surfaces` has HD95 and surface Dice as `ours`, of the rows that have them. `bytes` and
    `seconds` are those of one site in the mean, an entry per run. `settings` are the fields of the method's
    configuration.
    """

    published: Mapping[str, float] = field(default_factory=dict)
    ours: dict[int, dict[tuple[str, str], float]] = field(default_factory=dict)
    paper: dict[int, dict[str, float]] = field(default_factory=dict)
    surfaces: dict[str, dict[int, dict[tuple[str, str], float]]] = field(default_factory=dict)
    bytes: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)

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

    `published` has every arm, with what the paper prints for it; arms without a row are named below the
    table. `metric` and `papers_metric` name the two metrics, for the header; `note` stands below the title.
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
                line.settings = row["cell"].get("method", {})
        return lines

    def sections(self, figure: str) -> list[str]:
        """The part in Markdown; `figure` is the file of its figure."""
        sites = self._sites
        header = ["arm", *(f"paper, {column}" for column in self.columns), self.metric, self.papers_metric]
        header += ["HD95", "surface Dice", "no surface"] if self.surfaces else []
        header += [f"minus {self.baseline}", "MB per site", "seconds per site"]
        body = [
            [
                name,
                *(f"{line.published[c]:.1f}" if c in line.published else "" for c in self.columns),
                _percent(self._means(line.ours)),
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
        own = [
            [
                name,
                *(
                    _percent([tables.site_mean(found, [site]) for found in line.ours.values()])
                    for site in sites
                ),
            ]
            for name, line in self.lines.items()
            if line.ours
        ]
        missing = [name for name in self.published if name not in self.lines]
        begun = [
            f"{name}, seed {seed}: {', '.join(sorted(own))}"
            for name, line in self.lines.items()
            for seed, own in sorted(line.paper.items())
            if not {*own} >= {*sites}
        ]
        return [
            f"## {self.title}",
            self.note,
            table(header, body),
            *([f"Not run: {', '.join(missing)}."] if missing else []),
            *([f"In no mean, since not all sites are computed: {'; '.join(begun)}."] if begun else []),
            *([f"![Change of {self.metric} against {self.baseline}]({figure})"] if self.changes else []),
            f"{self.metric} at every site:",
            table(["arm", *sites], own),
            self._settings(),
        ]

    def _surfaces(self, line: Line) -> tuple[str, str, str]:
        """HD95, surface Dice in percent, and the number of patients without either."""
        hd95, nsd = (line.surfaces.get(metric, {}) for metric in SURFACES)
        means = [self._means(found) for found in (hd95, nsd)]
        lacking = sum(math.isnan(value) for own in hd95.values() for value in own.values())
        return mean_and_spread(means[0], 1), _percent(means[1]), f"{lacking}" if hd95 else "–"

    def _means(self, by_seed: tables.BySeed) -> list[float]:
        """The mean of sites of every seed that has all sites."""
        sites = self._sites
        whole = [own for own in by_seed.values() if {site for site, _ in own} >= {*sites}]
        return [tables.site_mean(own, sites) for own in whole]

    def _settings(self) -> str:
        """The fields of the baseline, or else of the first arm, and where others differ; folded away."""
        name = self.baseline if self.baseline in self.lines else next(iter(self.lines))
        base = self.lines[name].settings
        lines = [f"- {name}: {_fields(base)}"]
        for other, line in self.lines.items():
            own = {k: v for k, v in line.settings.items() if k not in base or base[k] != v}
            if own:
                lines.append(f"- {other}, otherwise as {name}: {_fields(own)}")
        text = "\n".join(lines)
        return f"<details><summary>Settings of the arms</summary>\n\n{text}\n\n</details>"

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
        found = [self.differs, *([_SURFACES] if self.surfaces else []), _MINUS, _SECONDS]
        for name, part in self._parts_of(rows).items():
            found += part.sections(self._file(name))
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
        """What the profile has and no row, with the commands that compute it."""
        lines = []
        for (part, arm), cells in self.lacking(rows).items():
            only = ["--only", f"part={part}", *(["--only", f"arm={arm}"] if arm else [])]
            command = f"{self.command} {shlex.join(only)}"
            seeds = sorted({cell["seed"] for cell in cells})
            said = f"{len(cells)} cell{'s' * (len(cells) > 1)}, seed{'s' * (len(seeds) > 1)}"
            which = f"{arm or 'all arms'} of `{part}`, {said} {', '.join(map(str, seeds))}"
            lines.append(f"- {which}:\n  `{command}`")
        return ["## Not computed yet", "\n".join(lines)] if lines else []

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


def _fields(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _percent(values: Sequence[float]) -> str:
    return mean_and_spread([100 * value for value in values], 1)
