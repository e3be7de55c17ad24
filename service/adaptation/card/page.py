"""Render a `Card` as one self-contained HTML page, light and dark, without a script."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import jinja2
from markupsafe import Markup

from service.about import NOTICE
from service.adaptation.card.charts import Mark, bars, curve, forest, lines
from service.adaptation.card.model import Card
from service.jobs.sections import Curves, HeatMap

REFRESH_SECONDS: Final = 5

# Two doublings of the uniform share give the full colour.
_FULL_COLOUR = 2.0


@dataclass(frozen=True)
class Cell:
    """One share on a heat map, and how it is coloured."""

    share: float
    tone: str
    strength: int
    title: str


def render(card: Card) -> str:
    """The page. The same card gives the same bytes."""
    return (
        _environment()
        .get_template("card.html")
        .render(card=card, refresh=REFRESH_SECONDS if card.under_way else None, notice=NOTICE)
    )


def heat_map(found: HeatMap) -> list[tuple[str, list[Cell]]]:
    """Each row's title and cells: one per column, and a last one for their mean."""
    uniform = 1 / len(found.rows)
    columns = [*found.shares, found.means]
    titles = [*found.columns, found.overall]
    return [
        (
            row,
            [
                _cell(column[index], uniform, f"{title}: {row}")
                for title, column in zip(titles, columns, strict=True)
            ],
        )
        for index, row in enumerate(found.rows)
    ]


def _cell(share: float, uniform: float, what: str) -> Cell:
    # Coloured by the ratio to the uniform share, not by the share: with many rows all shares are small.
    doublings = math.log2(max(share, 1e-6) / uniform)
    strength = round(100 * min(abs(doublings) / _FULL_COLOUR, 1.0))
    return Cell(share, "more" if doublings > 0 else "less", strength, f"{what} {share:.1%}")


def _charts(body: Curves) -> list[tuple[str, str, Markup]]:
    """Each curve's title, caption and drawing."""
    marks = [Mark(epoch, "unsafe") for epoch in body.unsafe]
    marks += [] if body.chosen is None else [Mark(body.chosen, "chosen")]
    return [
        (found.title, found.caption, curve(list(zip(body.epochs, found.values, strict=True)), marks))
        for found in body.curves
    ]


def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("service.adaptation.card"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"instant": _instant, "data_uri": _data_uri, "percent": _percent}
    found.filters |= {"heat_map": heat_map, "bars": bars, "forest": forest, "lines": lines, "charts": _charts}
    found.globals["duration"] = _duration
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _instant(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _duration(begin: datetime, end: datetime) -> str:
    seconds = round(max((end - begin) / timedelta(seconds=1), 0))
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    )


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
