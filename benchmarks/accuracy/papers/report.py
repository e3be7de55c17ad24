"""A part of a table's page: every arm with both metrics, its interval and its cost; a figure; every site."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import Any, ClassVar, TypeAlias

import numpy as np

from benchmarks.harness import scores as tables
from benchmarks.harness.cells import Row
from benchmarks.harness.experiment import Experiment, P
from benchmarks.harness.tables import Interval, mean_and_spread, table
from training.report.charts import Change, forest_chart

MEGABYTE = 1e6
_MINUS = (
    "*minus*: in points, over patients or images that both arms have, with sites weighted alike as in the "
    "means. A patient without a target counts 1 where one arm finds none and the other does; the means leave "
    "the patient out where none is found. Fewer seeds of an arm are compared with the same seeds alone."
)
_SECONDS = (
    "Seconds are wall-clock, the median over runs, of one thread on a machine with other work: they tell the "
    "order of magnitude."
)


@dataclass
class Line:
    """One arm: what the paper prints, and what was found in each seed.

    `ours` has the metric of every patient or image, by seed and (site, name); `paper` has the paper's metric,
    by seed and site. `bytes` and `seconds` are those of one site in the mean, an entry per run. `settings`
    are the fields of the method's configuration.
    """

    published: Mapping[str, float] = field(default_factory=dict)
    ours: dict[int, dict[tuple[str, str], float]] = field(default_factory=dict)
    paper: dict[int, dict[str, float]] = field(default_factory=dict)
    bytes: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def add(self, seed: int, site: str, ours: Mapping[str, float | None], paper: float) -> None:
        """Add what was found at a site."""
        values = {(site, name): math.nan if value is None else value for name, value in ours.items()}
        self.ours.setdefault(seed, {}).update(values)
        self.paper.setdefault(seed, {})[site] = paper

    def add_cost(self, cost: Mapping[str, float], seconds: float = 0.0) -> None:
        """Add the cost of a run, and the seconds of what came after it."""
        self.bytes.append(cost["sent"] + cost["received"])
        self.seconds.append(cost["seconds"] + seconds)


@dataclass(frozen=True)
class Part:
    """A table of a page. `baseline` is the arm that the others are compared with; `columns` are the paper's.

    `published` has every arm, with what the paper prints for it; arms without a row are named below the
    table. `metric` and `papers_metric` name the two metrics, for the header; `note` stands below the title.
    """

    title: str
    note: str
    rows: Sequence[Row] = field(repr=False)
    published: Mapping[str, Mapping[str, float]]
    baseline: str
    columns: Sequence[str]
    metric: str
    papers_metric: str

    @cached_property
    def lines(self) -> Mapping[str, Line]:
        """The arms that have a row, in the order of `published`."""
        lines: dict[str, Line] = {}
        for name, printed in self.published.items():
            for row in (row for row in self.rows if row["cell"]["arm"] == name):
                line, result = lines.setdefault(name, Line(printed)), row["result"]
                for site, found in result["sites"].items():
                    line.add(row["cell"]["seed"], site, found["ours"], found["paper"])
                line.add_cost(result["cost"], result.get("seconds", 0.0))
                line.settings = row["cell"].get("method", {})
        return lines

    def sections(self, figure: str) -> list[str]:
        """The part in Markdown; `figure` is the file of its figure."""
        sites = self._sites
        header = ["arm", *(f"paper, {column}" for column in self.columns), self.metric, self.papers_metric]
        header += [f"minus {self.baseline}", "MB per site", "seconds per site"]
        body = [
            [
                name,
                *(f"{line.published[c]:.1f}" if c in line.published else "" for c in self.columns),
                _percent([tables.site_mean(found, sites) for found in line.ours.values()]),
                _percent([float(np.mean([*found.values()])) for found in line.paper.values()]),
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
        return [
            f"## {self.title}",
            self.note,
            table(header, body),
            *([f"Not run: {', '.join(missing)}."] if missing else []),
            *([f"![Change of {self.metric} against {self.baseline}]({figure})"] if self.changes else []),
            f"{self.metric} at every site:",
            table(["arm", *sites], own),
            self._settings(),
        ]

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

    def _part(self, part: str, *place: Any, rows: Sequence[Row]) -> Part:
        printed, arms = self.prints(*place), self.published[part]
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
        )

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """What differs from the paper, then every part."""
        found = [self.differs, _MINUS, _SECONDS]
        for name, part in self._parts_of(rows).items():
            found += part.sections(self._file(name))
        return found

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
        return f"{self.rows_path.stem}.{name}.svg"


def _fields(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _percent(values: Sequence[float]) -> str:
    return mean_and_spread([100 * value for value in values], 1)
