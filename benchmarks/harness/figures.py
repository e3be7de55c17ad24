"""Figures of a page of results as SVG. Equal numbers give equal bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

_COLUMNS = 4
_INK, _FAINT, _DOT = "#3c4043", "#d9dce0", "#1f6f8b"


def strip_chart(parts: Mapping[str, Mapping[str, Sequence[float]]], along: str) -> str:
    """A dot for each hospital and seed, and a line at their mean, as an <svg> element.

    Args:
        parts: part of the figure -> row of it -> values in points; a row that a part has not got stays empty.
        along: what the values are, under each part. The axis is linear between -1 and 1, and logarithmic
            beyond, so that a small loss is seen beside a large gain.
    """
    lowest = min((min(values) for part in parts.values() for values in part.values()), default=0.0)
    rows = list(dict.fromkeys(row for part in parts.values() for row in part))
    columns = min(_COLUMNS, len(parts))
    lines = -(-len(parts) // columns)
    style: Any = {"svg.fonttype": "none", "font.size": 8, "text.color": _INK, "svg.hashsalt": ",".join(parts)}
    with mpl.rc_context(style):
        figure = Figure(figsize=(1.2 + 2.1 * columns, lines * (0.9 + 0.17 * len(rows))), layout="constrained")
        grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
        for axes in grid.flat[len(parts) :]:
            axes.set_visible(False)
        for axes, (name, part) in zip(grid.flat, parts.items(), strict=False):
            axes.set_title(name, fontsize=8)
            axes.axvline(0, color=_INK, linewidth=0.8)
            for place, row in enumerate(rows):
                if values := part.get(row):
                    axes.plot(values, [place] * len(values), "o", color=_DOT, alpha=0.4, markersize=3)
                    axes.plot(sum(values) / len(values), place, "|", color=_INK, markersize=8)
            axes.set_xscale("symlog", linthresh=1)
            axes.set_xlim(min(-20, 1.2 * lowest), 120)
            axes.set_xticks([-10, -1, 0, 1, 10, 100], ["-10", "-1", "0", "1", "10", "100"])
            axes.set_yticks(range(len(rows)), rows)
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.grid(axis="x", color=_FAINT, linewidth=0.6)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(length=0)
            axes.set_xlabel(along)
        content = io.StringIO()
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = content.getvalue()
    return svg[svg.index("<svg") :]
