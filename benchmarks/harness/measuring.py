"""What benchmarks of cost have in common: a median with its quartiles, and a process's peak of memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import quantiles


def quartiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median, lower and upper quartile, as rows have them."""
    quarter, middle, three_quarters = quantiles(seconds, n=4)
    return {"median": round(middle, 5), "q1": round(quarter, 5), "q3": round(three_quarters, 5)}


def milliseconds(seconds: Mapping[str, float], digits: int = 1) -> str:
    """`12.3 [11.9, 13.0]`: the same for a page."""
    middle, low, high = (f"{1e3 * seconds[name]:.{digits}f}" for name in ("median", "q1", "q3"))
    return f"{middle} [{low}, {high}]"


def high_water() -> int:
    """The most resident memory that this process ever had, in bytes; Linux only."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) * 1024
