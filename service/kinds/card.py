"""Sections of a card that are special to a kind of artefact, as plain values.

A kind builds them from what a worker wrote; `service.adaptation.card.page` draws them. Text is escaped there,
unless it is `Markup`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeatMap:
    """Shares of `rows` in each of `columns`: `values[column][row]`, none negative.

    They are normalised per column, and coloured by their ratio to equal shares. A last column has each row's
    mean over all columns; `overall` is its title.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    overall: str

    def shares(self) -> tuple[tuple[float, ...], ...]:
        """Each column divided by its sum; a column of zeros stays one."""
        return tuple(tuple(value / (sum(column) or 1.0) for value in column) for column in self.values)

    def means(self) -> tuple[float, ...]:
        """Each row's share, averaged over the columns."""
        shares = self.shares()
        return tuple(sum(row) / len(shares) for row in zip(*shares, strict=True))


@dataclass(frozen=True)
class Bars:
    """Shares of 1 by name, a bar each, in this order; the bar named `own` has a colour of its own."""

    shares: Mapping[str, float]


@dataclass(frozen=True)
class Interval:
    """A row of a forest plot: a value with its lowest and highest; `own` stands apart from the others."""

    name: str
    value: float
    low: float
    high: float
    own: bool = False


@dataclass(frozen=True)
class Forest:
    """Changes of Dice beside each other, from a line at 0."""

    rows: tuple[Interval, ...]


@dataclass(frozen=True)
class Row:
    """A row of a table; `mark`, if any, is emphasised in a last column."""

    name: str
    texts: tuple[str, ...]
    numbers: tuple[float | None, ...]
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """Rows with a name, texts and numbers; `texts` titles the name too."""

    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Section:
    """A heading, a sentence or two, and what they are about."""

    title: str
    text: str
    body: HeatMap | Bars | Forest | Table


def number(value: Any) -> float | None:
    """A number from JSON; None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
