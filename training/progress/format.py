"""Numbers as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def size(count: float) -> str:
    """Bytes in decimal units: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """0:07, 12:45, 3:04:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number(value: float | None) -> str:
    """Three decimals; a dash for nothing to say."""
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """The last values within [0, 1] as small bars; a blank where there is none."""
    shown = values[-width:]
    return "".join(
        " " if math.isnan(v) else _BARS[min(max(int(v * len(_BARS)), 0), len(_BARS) - 1)] for v in shown
    )
