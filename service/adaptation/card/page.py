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
from service.adaptation.card.charts import Mark, bars, curve, forest
from service.adaptation.card.model import Card, Epoch
from service.kinds.card import Bars, Forest, HeatMap

REFRESH_SECONDS: Final = 5

_STATES: Final = {
    "queued": ("waiting", "Waiting for a worker."),
    "running": ("busy", "Under way."),
    "cancelling": ("busy", "Being cancelled."),
    "succeeded": ("good", "Finished."),
    "fell_back": ("warn", "Nothing safer or better than step 0 was found, so step 0 was kept."),
    "failed": ("bad", "Failed."),
    "cancelled": ("off", "Cancelled."),
}

_CAPTIONS: Final = {
    "loss": "What the epochs are chosen by: over all images, after the epoch, with one fixed noise draw.",
    "foreground": "Share of the pixels that are not background.",
    "agreement": "Dice with the masks of step 0.",
}
# Two doublings of the uniform share give the full colour.
_FULL_COLOUR = 2.0


@dataclass(frozen=True)
class Chart:
    """A curve with its title and what it means."""

    title: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class Cell:
    """One share on a heat map, and how it is coloured."""

    share: float
    tone: str
    strength: int
    title: str


def render(card: Card) -> str:
    """The page. The same card gives the same bytes."""
    tone, sentence = _STATES.get(card.state, ("off", ""))
    return (
        _environment()
        .get_template("card.html")
        .render(
            card=card,
            tone=tone,
            sentence=sentence,
            refresh=REFRESH_SECONDS if card.under_way else None,
            charts=charts(card),
            unsafe=[epoch for epoch in card.epochs if not epoch.safe],
            notice=NOTICE,
        )
    )


def charts(card: Card) -> list[Chart]:
    """The total loss, its parts, foreground and agreement: those of which there is something to show."""
    parts = dict.fromkeys(name for epoch in card.epochs for name in epoch.parts)
    series = {
        "loss": [(e.epoch, e.loss) for e in card.epochs],
        **{name: [(e.epoch, e.parts.get(name)) for e in card.epochs] for name in parts},
        "foreground": [(e.epoch, e.foreground) for e in card.epochs],
        "agreement": [(e.epoch, e.agreement) for e in card.epochs],
    }
    captions = {**_CAPTIONS, **card.words.parts}
    marks = _marks(card.epochs, card.best_epoch)
    drawn = [
        Chart(name.replace("_", " "), captions.get(name, ""), curve(points, marks))
        for name, points in series.items()
        if points
    ]
    return [chart for chart in drawn if chart.svg]


def heat_map(found: HeatMap) -> list[tuple[str, list[Cell]]]:
    """Each row's title and cells: one per column, and a last one for their mean."""
    uniform = 1 / len(found.rows)
    columns = [*found.shares(), found.means()]
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


def _marks(epochs: tuple[Epoch, ...], best: int | None) -> list[Mark]:
    unsafe = [Mark(epoch.epoch, "unsafe") for epoch in epochs if not epoch.safe]
    return unsafe if best is None else [*unsafe, Mark(best, "chosen")]


def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("service.adaptation.card"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"number": _number, "instant": _instant, "data_uri": _data_uri, "percent": _percent}
    found.filters |= {"heat_map": heat_map, "bars": _bars, "forest": _forest}
    found.tests |= {
        "heat_map": lambda body: isinstance(body, HeatMap),
        "bars": lambda body: isinstance(body, Bars),
        "forest": lambda body: isinstance(body, Forest),
    }
    found.globals["duration"] = _duration
    return found


def _bars(body: Bars) -> Markup:
    return bars(body.shares)


def _forest(body: Forest) -> Markup:
    return forest(body.rows)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


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
