"""The table of a comparison for people and programs: compare.md, compare.html and compare.json.

None of them has a patient's name or score; rows.jsonl beside them has both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from model_store.durable import write_durably
from personalization.metrics import METRICS
from training.compare.figures import Difference, Hospital, Line, in_words, shown
from training.data.cases import FEW_CASES
from training.progress.format import duration, size

NAME = "compare"
_FEW = "†"


class Figure(NamedTuple):
    """A cell of the table: its figure, what stands behind it, and whether it is the best of its column."""

    text: str
    rest: str = ""
    best: bool = False


@dataclass(frozen=True)
class Comparison:
    """A comparison as far as it has come.

    `failed` and `missing` have seeds by method, the failed ones with the reason. `go_on` is the command that
    trains what is missing.
    """

    task: str
    metric: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    sites: tuple[str, ...]
    lines: tuple[Line, ...]
    failed: Mapping[str, Mapping[int, str]]
    missing: Mapping[str, Sequence[int]]
    folder: Path
    go_on: str = ""

    @property
    def verdict(self) -> list[str]:
        """What the table says, in sentences."""
        said = in_words(self.lines, self.methods, self.title)
        for name, reasons in self.failed.items():
            by_reason: dict[str, list[int]] = {}
            for seed, reason in reasons.items():
                by_reason.setdefault(reason, []).append(seed)
            said += [f"{name} failed ({_seeds(own)}): {reason}" for reason, own in by_reason.items()]
        said += [f"{name} is not trained yet ({_seeds(own)})." for name, own in self.missing.items()]
        return said

    def markdown(self) -> str:
        """The page as Markdown."""
        rows = [[f"**{n}**{rest}" if bold else n + rest for n, rest, bold in row] for row in self._rows()]
        parts = [
            f"# {', '.join(self.methods)} on {self.task}",
            "\n".join(f"- {sentence}" for sentence in self.verdict),
            _table([self._header(), *rows]) if rows else "",
            self.note,
            f"Go on with\n\n    {self.go_on}" if self.missing and self.go_on else "",
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    @property
    def note(self) -> str:
        """How the figures are to be read."""
        return (
            f"{self.title[0].upper()}{self.title[1:]} of the test patients, by the model that answers each "
            "hospital: the mean over hospitals, and in brackets that of each seed. A difference is of the "
            "same patients, each the mean of its seeds, with 95 % by Student's t within hospitals. It covers "
            "patients, not trainings, and stands by itself: one interval of twenty misses. Bytes of one "
            f"hospital and the time are of one seed. {_FEW}: fewer than {FEW_CASES} patients, neither bold "
            "nor ranked."
        )

    @property
    def title(self) -> str:
        """The metric in words."""
        return METRICS[self.metric].title

    def _header(self) -> list[str]:
        score = f"{self.title}, mean over hospitals"
        first = f"difference from {self.methods[0]}"
        return ["method", "answers", score, "worst hospital", first, "rounds", "sent", "received", "time"]

    def _rows(self) -> list[list[Figure]]:
        """The table's cells."""
        scored = [line.score for line in self.lines if not line.few]
        worst = [line.worst.score for line in self.lines if not line.worst.few]
        several = len(self.lines) > 1
        return [
            [
                Figure(line.method),
                Figure(line.answers),
                Figure(
                    f"{line.score:.3f}",
                    f"{_mark(line.few)} ({', '.join(f'{value:.3f}' for value in line.by_seed.values())})",
                    several and not line.few and line.score == max(scored),
                ),
                Figure(
                    f"{line.worst.score:.3f}",
                    f"{_mark(line.worst.few)} {line.worst.name}, n={line.worst.patients}",
                    several and not line.worst.few and line.worst.score == max(worst),
                ),
                Figure(_difference(line, self.methods[0])),
                Figure(str(line.rounds)),
                Figure(size(line.sent)),
                Figure(size(line.received)),
                Figure(duration(line.seconds) if line.seconds >= 60 else f"{line.seconds:.1f} s"),
            ]
            for line in self.lines
        ]

    def content(self) -> dict[str, Any]:
        """The table as JSON, without patients."""
        return {
            "task": self.task,
            "metric": self.metric,
            "methods": list(self.methods),
            "seeds": list(self.seeds),
            "sites": list(self.sites),
            "verdict": self.verdict,
            "few_cases": FEW_CASES,
            "lines": [_line(line) for line in self.lines],
            "failed": {
                name: {str(seed): why for seed, why in own.items()} for name, own in self.failed.items()
            },
            "missing": {name: list(own) for name, own in self.missing.items()},
            "go_on": self.go_on if self.missing else None,
        }

    def html(self) -> str:
        """The page as HTML."""
        # It draws with matplotlib, which takes a second to import.
        from training.report.charts import Change, forest_chart
        from training.report.page import environment

        templates = environment()
        assert templates.loader is not None
        templates.loader = jinja2.ChoiceLoader([templates.loader, jinja2.PackageLoader("training.compare")])
        changes = [
            Change(line.method, found.all.change, found.all.low, found.all.high)
            for line in self.lines
            if (found := line.difference) is not None
        ]
        return templates.get_template("compare.html").render(
            comparison=self,
            header=self._header(),
            rows=self._rows(),
            chart=forest_chart(changes, self.title) if changes else "",
            hospitals=[
                {"method": line.method, **{each.name: _hospital(each) for each in line.hospitals}}
                for line in self.lines
            ],
        )

    def write(self) -> Path:
        """Write the three files, and return the page."""
        page = self.folder / f"{NAME}.html"
        write_durably(page, self.html().encode())
        write_durably(page.with_suffix(".md"), self.markdown().encode())
        content = json.dumps(self.content(), indent=1, ensure_ascii=False)
        write_durably(page.with_suffix(".json"), f"{content}\n".encode())
        return page


def _difference(line: Line, first: str) -> str:
    if line.method == first:
        return "–"
    found = line.difference
    return shown(found) + _mark(found is not None and found.few)


def _hospital(found: Hospital) -> str:
    return f"{found.score:.3f}{_mark(found.few)}, n={found.patients}"


def _mark(few: bool) -> str:
    return f" {_FEW}" if few else ""


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _line(line: Line) -> dict[str, Any]:
    found: Difference | None = line.difference
    return {
        **asdict(line),
        "score": line.score,
        "worst": line.worst.name,
        "patients": line.patients,
        "difference": None
        if found is None
        else {**asdict(found.all), "by_seed": dict(found.by_seed), "verdict": found.verdict},
    }


def _table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded to be read raw."""
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(lines[0]))]
    header, *body = (
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join((header, rule, *body))
