"""Draw line charts and forest plots as inline SVG. Equal numbers give equal bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from training.progress.format import size

# Distinguishable with colour vision deficiency and, by lightness, in print.
PALETTE = ("#1f6f8b", "#d1603d", "#6a994e", "#7b5ea7", "#b8860b", "#4a4e69", "#c04d79", "#3a8f85")
_INK, _FAINT = "#3c4043", "#d9dce0"
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


@dataclass(frozen=True)
class Line:
    """One curve: its points (x, y), with x usually the round, and its colour."""

    points: Sequence[tuple[float, float]]
    colour: str


def colour_of(index: int) -> str:
    """Return the colour of the site at that index. Colours repeat after eight."""
    return PALETTE[index % len(PALETTE)]


def line_chart(
    lines: Mapping[str, Line],
    *,
    share: bool = False,
    unit: str = "",
    zero: bool = True,
    best: Literal["highest", "lowest"] | None = None,
    along: str = "round",
) -> str:
    """Draw curves over rounds (or over `along`), as an <svg> element.

    `share` fixes the y axis to [0, 1], `zero` starts it at 0, `unit` "B" formats bytes, `best` marks the best
    point of a curve.
    """
    with mpl.rc_context({**_STYLE, "svg.hashsalt": ",".join(lines) + unit + str(share)}):
        figure = Figure(figsize=(4.6, 2.5), layout="constrained")
        axes = figure.add_subplot()
        for line in lines.values():
            x, y = zip(*line.points, strict=True) if line.points else ((), ())
            axes.plot(x, y, color=line.colour, linewidth=1.6, solid_capstyle="round")
            if len(line.points) == 1:
                axes.plot(x, y, marker="o", markersize=3.5, color=line.colour)
            if best and line.points:
                choose = min if best == "lowest" else max
                top = choose(line.points, key=lambda point: point[1])
                axes.plot(*top, marker="o", markersize=4.5, color=line.colour, markeredgecolor="white")
        _dress(axes, share, unit, zero, along)
        if len(places := {x for line in lines.values() for x, _ in line.points}) == 1:
            axes.set_xticks([*places])
        return _svg(figure)


@dataclass(frozen=True)
class Change:
    """A hospital's change of Dice, and the range that it had, if it had one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


def forest_chart(changes: Sequence[Change], metric: str = "Dice") -> str:
    """Draw a dot per hospital with its range, from the top, and a line at 0, as an <svg> element.

    `metric` names what changes.
    """
    with mpl.rc_context({**_STYLE, "svg.hashsalt": ",".join(change.name for change in changes)}):
        figure = Figure(figsize=(4.6, 0.7 + 0.28 * len(changes)), layout="constrained")
        axes = figure.add_subplot()
        axes.axvline(0, color=_INK, linewidth=0.8)
        for row, change in enumerate(changes):
            if change.low is not None and change.high is not None:
                axes.hlines(row, change.low, change.high, color=_INK, linewidth=1.2)
            axes.plot(change.value, row, marker="o", markersize=5, color=PALETTE[0])
        axes.set_yticks(range(len(changes)), [change.name for change in changes])
        axes.set_ylim(len(changes) - 0.5, -0.5)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", color=_FAINT, linewidth=0.6)
        axes.tick_params(length=0)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.3g}" if value else "0"))
        axes.set_xlabel(f"change of {metric}")
        return _svg(figure)


def _svg(figure: Figure) -> str:
    content = io.StringIO()
    figure.savefig(content, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = content.getvalue()
    return svg[svg.index("<svg") :]


def _dress(axes: Any, share: bool, unit: str, zero: bool, along: str) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color=_FAINT, linewidth=0.6)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.set_xlabel(along)
    if share:
        axes.set_ylim(0, 1.02)
    elif zero:
        axes.set_ylim(bottom=0)
    if unit == "B":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    elif unit:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} {unit}"))
