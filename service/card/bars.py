"""Shares as horizontal bars: inline SVG in the page's own colours, as the curves are."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup, escape

WIDTH = 640
_ROW, _BAR, _LEFT, _RIGHT = 26, 16, 170, 60
_LONGEST_NAME = 24


def bars(shares: Mapping[str, float], own: str = "own") -> Markup:
    """One bar per name, in order, its length the share of 1; the one called `own` stands apart in colour.

    Empty without shares. Names may come from anybody: they are escaped, and cut where they are long.
    """
    if not shares:
        return Markup("")
    parts = []
    for row, (name, share) in enumerate(shares.items()):
        top, length = row * _ROW + (_ROW - _BAR) / 2, round(share * (WIDTH - _LEFT - _RIGHT), 2)
        shown = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
        parts.append(
            f'<g><title>{escape(name)}: {share:.2%}</title><text class="y" x="{_LEFT - 8}" y="{top + 12:g}">'
            f'{escape(shown)}</text><rect class="{"own" if name == own else "bar"}" x="{_LEFT}" y="{top:g}" '
            f'width="{length:g}" height="{_BAR}" rx="2"/><text class="share" x="{_LEFT + length + 7:g}" '
            f'y="{top + 12:g}">{share:.1%}</text></g>'
        )
    said = escape(", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {len(shares) * _ROW}" role="img" aria-label="{said}">'
        f"{''.join(parts)}</svg>"
    )
