"""Sections of a job's card: a heading, sentences, and the checks, curves or table that they are about.

The service builds them once. `GET /jobs/{id}` sends them, and two renderers draw them by `form`, without
knowing what they say: `service.adaptation.card.page` in HTML, `web/src/views/adapt/sections.tsx` on the page.
Text may come from anybody: the renderers escape it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Tone = Literal["plain", "accent", "warn", "good", "bad"]
Outcome = Literal["passed", "failed", "not measured"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)


class CheckRow(_Part):
    """One check of a gate."""

    name: str
    meaning: str = Field(description="What the value is.")
    found: str
    limit: str = Field(description="With its bound, as `≥ 0.8`.")
    outcome: Outcome


class Checks(_Part):
    """The checks of a gate, in its order."""

    form: Literal["checks"] = "checks"
    rows: tuple[CheckRow, ...]


class Curve(_Part):
    """One figure over the epochs; null where it is unknown."""

    title: str
    caption: str
    values: tuple[float | None, ...]


class Curves(_Part):
    """Figures over the same epochs, by their numbers."""

    form: Literal["curves"] = "curves"
    epochs: tuple[int, ...]
    curves: tuple[Curve, ...]
    chosen: int | None = Field(description="The epoch that was kept.")
    unsafe: tuple[int, ...] = Field(description="The epochs that a safety limit stopped.")


class Line(_Part):
    """A named line of a figure."""

    name: str
    values: tuple[float, ...]


class Lines(_Part):
    """At most three lines over the same places, in one figure."""

    form: Literal["lines"] = "lines"
    across: str = Field(description="What the places are.")
    places: tuple[float, ...]
    lines: tuple[Line, ...] = Field(min_length=1, max_length=3)


class HeatMap(_Part):
    """Shares of the rows in each column, coloured by their ratio to equal shares."""

    form: Literal["heat-map"] = "heat-map"
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    shares: tuple[tuple[float, ...], ...] = Field(
        description="`shares[column][row]`; those of a column add up to 1."
    )
    overall: str = Field(description="Title of `means`.")
    means: tuple[float, ...] = Field(description="Each row's share, averaged over the columns.")


class Bar(_Part):
    """A named share of 1; `own` stands apart from the others."""

    name: str
    share: float
    own: bool = False


class Bars(_Part):
    """Shares of 1, a bar each, in this order."""

    form: Literal["bars"] = "bars"
    rows: tuple[Bar, ...]


class Interval(_Part):
    """A value with its lowest and highest; `own` stands apart from the others."""

    name: str
    value: float
    low: float
    high: float
    own: bool = False


class Forest(_Part):
    """A forest plot of changes of Dice, with a line at 0."""

    form: Literal["forest"] = "forest"
    rows: tuple[Interval, ...]


class Row(_Part):
    """A row of a table: its name, a cell for each further column, and a mark that is emphasised, if any."""

    name: str
    cells: tuple[str, ...]
    mark: str = ""


class Table(_Part):
    """Rows of text and figures. The first column has the rows' names."""

    form: Literal["table"] = "table"
    columns: tuple[str, ...]
    figures: int = Field(description="Number of columns at the right that hold figures.")
    rows: tuple[Row, ...]


Body = Annotated[Checks | Curves | Lines | HeatMap | Bars | Forest | Table, Field(discriminator="form")]


class Section(_Part):
    """A part of a job's card, in the words that a person reads."""

    title: str
    tone: Tone = Field("plain", description="`good` and `bad` are a verdict.")
    sentences: tuple[str, ...] = ()
    reasons: tuple[str, ...] = Field((), description="What speaks against it: a list below the sentences.")
    body: Body | None = None


def heat_map(
    columns: Sequence[str], rows: Sequence[str], values: Sequence[Sequence[float]], overall: str
) -> HeatMap:
    """Shares from `values[column][row]`, none negative: each column divided by its sum, zeros stay zeros.

    There is at least one column and one row.
    """
    shares = tuple(tuple(value / (sum(column) or 1.0) for value in column) for column in values)
    means = tuple(sum(row) / len(shares) for row in zip(*shares, strict=True))
    return HeatMap(columns=tuple(columns), rows=tuple(rows), shares=shares, overall=overall, means=means)


def number(value: Any) -> float | None:
    """A number from JSON; None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def percent(value: float | None) -> str:
    """A Dice as it is shown: in percent, so that a change of it is in points."""
    return "–" if value is None else f"{100 * value:.1f} %"


def points(value: float | None) -> str:
    """A change of Dice, in points of a percentage."""
    return "–" if value is None else f"{100 * value:+.1f} points"


def unit_of(meaning: str) -> Callable[[float | None], str]:
    """How a check's value is shown, by what it is."""
    if meaning.startswith("Dice"):
        return percent
    return points if meaning.startswith("change of Dice") else figure


def figure(value: float | None) -> str:
    """A number as it is shown, to four digits; a dash where there is none."""
    return "–" if value is None else f"{value:.4g}"
