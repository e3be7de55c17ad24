"""Draw curves and bars of a card as inline SVG, in the page's light or dark colours.

Drawn by hand, and holding numbers only: a plotting library would bring its memory into the API, and colours
that are fixed when the page is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from service.jobs.sections import Bars, Forest, Lines

# Of bars and forest plots, which have names at their left.
NAMED_WIDTH = 640
_ROW, _BAR, _NAMES, _SHARES = 26, 16, 170, 60
_LONGEST_NAME = 24


def bars(found: Bars) -> Markup:
    """One bar per name, its length the share of 1; `own` stands apart in colour. Empty without rows.

    Names may come from anybody: they are escaped, and cut where they are long.
    """
    if not found.rows:
        return Markup("")
    parts = []
    for index, row in enumerate(found.rows):
        top = index * _ROW + (_ROW - _BAR) / 2
        length = round(row.share * (NAMED_WIDTH - _NAMES - _SHARES), 2)
        parts.append(
            f'<g><title>{escape(row.name)}: {row.share:.2%}</title><text class="y" x="{_NAMES - 8}" '
            f'y="{top + 12:g}">{_shown(row.name)}</text><rect class="{"own" if row.own else "bar"}" '
            f'x="{_NAMES}" y="{top:g}" width="{length:g}" height="{_BAR}" rx="2"/><text class="share" '
            f'x="{_NAMES + length + 7:g}" y="{top + 12:g}">{row.share:.1%}</text></g>'
        )
    said = escape(", ".join(f"{row.name} {row.share:.1%}" for row in found.rows))
    return Markup(
        f'<svg viewBox="0 0 {NAMED_WIDTH} {len(found.rows) * _ROW}" role="img" aria-label="{said}">'
        f"{''.join(parts)}</svg>"
    )


def forest(found: Forest) -> Markup:
    """A forest plot of changes of Dice: a dot with its range per row, and a line at 0. Empty without rows."""
    rows = found.rows
    if not rows:
        return Markup("")
    levels = ticks(min(0.0, *(row.low for row in rows)), max(0.0, *(row.high for row in rows)))
    x = Scale(levels[0], levels[-1], _NAMES, NAMED_WIDTH - _SHARES)
    height = (len(rows) + 1) * _ROW
    parts = [
        f'<line class="{"zero" if abs(level) < 1e-9 else "grid"}" x1="{x(level)}" x2="{x(level)}" y1="0" '
        f'y2="{height - _ROW}"/><text class="x" x="{x(level)}" y="{height - 8}">{level:+.3g}</text>'
        for level in levels
    ]
    for index, row in enumerate(rows):
        middle, kind = index * _ROW + _ROW / 2, "chosen" if row.own else "dot"
        parts.append(
            f"<g><title>{escape(row.name)}: {row.value:+.3f} ({row.low:+.3f} to {row.high:+.3f})</title>"
            f'<text class="y" x="{_NAMES - 8}" y="{middle + 4:g}">{_shown(row.name)}</text>'
            f'<line class="range" x1="{x(row.low)}" x2="{x(row.high)}" y1="{middle:g}" y2="{middle:g}"/>'
            f'<circle class="{kind}" cx="{x(row.value)}" cy="{middle:g}" r="5"/></g>'
        )
    said = escape(", ".join(f"{row.name} {row.value:+.3f}" for row in rows))
    return Markup(
        f'<svg viewBox="0 0 {NAMED_WIDTH} {height}" role="img" aria-label="{said}">{"".join(parts)}</svg>'
    )


def _shown(name: str) -> Markup:
    return escape(name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…")


# Of curves.
WIDTH, HEIGHT = 420, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 34
_MOST_LABELS = 10


@dataclass(frozen=True)
class Mark:
    """A point that means something: the `chosen` epoch, or an `unsafe` one."""

    epoch: int
    kind: str


@dataclass(frozen=True)
class Scale:
    """Linear from [low, high] to pixels [begin, end]."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        span = self.high - self.low or 1.0
        return round(self.begin + (value - self.low) / span * (self.end - self.begin), 2)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from at or below `low` to at or above `high`."""
    if not high > low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    rough = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(step * magnitude for step in (1, 2, 5, 10) if step * magnitude >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def curve(points: Sequence[tuple[int, float | None]], marks: Sequence[Mark] = ()) -> Markup:
    """Values over epochs as an `<svg>`; a value that is missing or not finite leaves a gap."""
    drawn = [(epoch, value) for epoch, value in points if value is not None and math.isfinite(value)]
    if not drawn:
        return Markup("")
    values = [value for _, value in drawn]
    levels = ticks(min(values), max(values))
    x = Scale(points[0][0], points[-1][0], _LEFT, WIDTH - _RIGHT)
    y = Scale(levels[0], levels[-1], HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(level)}" y2="{y(level)}"/>'
        f'<text class="y" x="{_LEFT - 7}" y="{y(level) + 3.5}">{level:.4g}</text>'
        for level in levels
    ]
    stride = -(-len(points) // _MOST_LABELS)
    parts += [
        f'<text class="x" x="{x(epoch)}" y="{HEIGHT - _BOTTOM + 16}">{epoch}</text>'
        for epoch, _ in points[::stride]
    ]
    parts += [f'<polyline class="curve" points="{piece}"/>' for piece in _pieces(points, x, y)]
    known = dict(drawn)
    parts += [
        f'<circle class="{mark.kind}" cx="{x(mark.epoch)}" cy="{y(known[mark.epoch])}" r="4.5"/>'
        for mark in marks
        if mark.epoch in known
    ]
    parts.append(f'<text class="x" x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 3}">epoch</text>')
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-hidden="true">{"".join(parts)}</svg>')


def lines(found: Lines, usual: float = 0.0) -> Markup:
    """The lines of a figure, with their names above it in their colours.

    With `usual`, there is a band around the first line, so far above and below it.
    """
    values = [value for line in found.lines for value in line.values]
    first = found.lines[0].values
    high, low = ([value + beyond for value in first] for beyond in (usual, -usual))
    values += [*high, *low]
    across, levels = ticks(min(found.places), max(found.places)), ticks(min(values), max(values))
    x = Scale(across[0], across[-1], _LEFT, NAMED_WIDTH - _RIGHT)
    y = Scale(levels[0], levels[-1], HEIGHT, _TOP + _ROW)
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{NAMED_WIDTH - _RIGHT}" y1="{y(level)}" y2="{y(level)}"/>'
        f'<text class="y" x="{_LEFT - 7}" y="{y(level) + 3.5}">{level:.4g}</text>'
        for level in levels
    ]
    parts += [f'<text class="x" x="{x(place)}" y="{HEIGHT + 16}">{place:.4g}</text>' for place in across]
    if usual:
        border = [*zip(found.places, high, strict=True), *reversed([*zip(found.places, low, strict=True)])]
        drawn = " ".join(f"{x(place)},{y(value)}" for place, value in border)
        parts.append(f'<polygon class="band" points="{drawn}"/>')
    for index, line in enumerate(found.lines):
        points = zip(found.places, line.values, strict=True)
        drawn = " ".join(f"{x(place)},{y(value)}" for place, value in points)
        at = _LEFT + index * (NAMED_WIDTH - _LEFT) / len(found.lines)
        parts.append(
            f'<polyline class="line line-{index}" points="{drawn}"/>'
            f'<line class="line line-{index}" x1="{at:g}" x2="{at + 18:g}" y1="10" y2="10"/>'
            f'<text x="{at + 24:g}" y="14">{_shown(line.name)}</text>'
        )
    middle, below = (NAMED_WIDTH + _LEFT) / 2, HEIGHT + 31
    parts.append(f'<text class="x" x="{middle}" y="{below}">{escape(found.across)}</text>')
    said = escape(f"{', '.join(line.name for line in found.lines)}, over {found.across}")
    view = f"0 0 {NAMED_WIDTH} {HEIGHT + 36}"
    return Markup(f'<svg viewBox="{view}" role="img" aria-label="{said}">{"".join(parts)}</svg>')


def cells(grids: Sequence[tuple[str, Sequence[Sequence[float]]]]) -> Markup:
    """Grids of values beside each other, each with its name above, from the least of all in black to the
    largest in white. They have one shape.
    """
    values = [value for _, rows in grids for row in rows for value in row]
    grey = Scale(min(values), max(values), 0, 255)
    parts = []
    for index, (name, rows) in enumerate(grids):
        left, side = _LEFT + index * (NAMED_WIDTH - _LEFT) / len(grids), HEIGHT / len(rows)
        parts.append(f'<text x="{left:g}" y="14">{_shown(name)}</text>')
        for down, row in enumerate(rows):
            for right, value in enumerate(row):
                tone = round(grey(value))
                parts.append(
                    f'<rect x="{left + right * side:g}" y="{_ROW + down * side:g}" width="{side:g}" '
                    f'height="{side:g}" fill="rgb({tone},{tone},{tone})"/>'
                )
    said = escape(", ".join(name for name, _ in grids))
    view = f"0 0 {NAMED_WIDTH} {HEIGHT + _ROW + _TOP}"
    return Markup(f'<svg viewBox="{view}" role="img" aria-label="{said}">{"".join(parts)}</svg>')


# Those of the page that is light.
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#555}.title{font-size:14px;font-weight:600;fill:#222}"
    ".x{text-anchor:middle}.y{text-anchor:end}.grid{stroke:#ddd}.band{fill:#888;opacity:.25}"
    ".line{fill:none;stroke-width:2}.line-0{stroke:#888;stroke-dasharray:5 4}.line-1{stroke:#d08700}"
    ".line-2{stroke:#1f6feb}"
)
_VIEW = re.compile(r'<svg viewBox="0 0 (\d+) (\d+)"')


def file_of(figures: Sequence[tuple[str, Markup]]) -> str:
    """Figures below one another, each with its title, as an SVG file with colours of its own."""
    parts, top = [], 0
    for title, drawn in figures:
        found = _VIEW.match(drawn)
        assert found is not None, "a figure has a view from 0 0"
        if title:
            parts.append(f'<text class="title" x="8" y="{top + _ROW}">{escape(title)}</text>')
            top += _ROW + _TOP
        placed = f'<svg y="{top}" width="{found[1]}" height="{found[2]}" viewBox="0 0 {found[1]} {found[2]}"'
        parts.append(placed + str(drawn)[found.end() :])
        top += int(found[2])
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" width="{NAMED_WIDTH}" height="{top}" '
    view = f'viewBox="0 0 {NAMED_WIDTH} {top}"><style>{_STYLE}</style>'
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    return f"{begin}{view}{paper}{''.join(parts)}</svg>\n"


def _pieces(points: Sequence[tuple[int, float | None]], x: Scale, y: Scale) -> list[str]:
    pieces: list[list[str]] = [[]]
    for epoch, value in points:
        if value is None or not math.isfinite(value):
            pieces.append([])
        else:
            pieces[-1].append(f"{x(epoch)},{y(value)}")
    # A point between two gaps would be a line of no length, which is not drawn: it goes there and back.
    return [" ".join(piece * 2 if len(piece) == 1 else piece) for piece in pieces if piece]
