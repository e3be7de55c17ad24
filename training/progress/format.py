"""Format bytes, durations, metrics and sparklines for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def size(count: float) -> str:
    """Format bytes in decimal units: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Format seconds as 0:07, 12:45 or 3:04:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number(value: float | None) -> str:
    """Format a number with three decimals, and None or NaN as a dash."""
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """Format the last `width` values within [0, 1] as small bars, and NaN as a blank."""
    shown = values[-width:]
    highest = len(_BARS) - 1
    return "".join(
        # Bounded before it is rounded: an infinite value has no integer.
        " " if math.isnan(v) else _BARS[int(min(max(v * len(_BARS), 0), highest))]
        for v in shown
    )
