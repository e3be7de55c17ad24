"""Measurement of cost: alternated timing, medians with quartiles, and peak memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import quantiles


def alternated(
    steps: Mapping[str, Callable[[], object]], repeats: int, warm_up: int
) -> dict[str, list[float]]:
    """Seconds of every step, run in turn `repeats` times after `warm_up` rounds that are not kept.

    The steps alternate, so that other load on the machine disturbs all of them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(warm_up + repeats):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return {name: values[warm_up:] for name, values in seconds.items()}


def quartiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median, lower and upper quartile, in the form of the rows."""
    quarter, middle, three_quarters = quantiles(seconds, n=4)
    return {"median": round(middle, 5), "q1": round(quarter, 5), "q3": round(three_quarters, 5)}


def milliseconds(seconds: Mapping[str, float], digits: int = 1) -> str:
    """Quartiles in the form of the pages: `12.3 [11.9, 13.0]`, in milliseconds."""
    middle, low, high = (f"{1e3 * seconds[name]:.{digits}f}" for name in ("median", "q1", "q3"))
    return f"{middle} [{low}, {high}]"


def high_water(process: int | str = "self") -> int:
    """Peak of resident memory of a process, this one by default, in bytes; Linux only."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) * 1024
