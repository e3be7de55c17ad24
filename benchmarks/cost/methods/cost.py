"""A cost: two sides that are timed in turn, the plain one and the method's, and what else a line says.

A result has `seconds` of both sides, their `ratio`, and where they are measured `floor` (the ratio of
multiply-adds) and `peak_bytes` of both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from benchmarks.harness.cells import Cell
from benchmarks.harness.measuring import alternated, quartiles

PLAIN, METHOD = "plain", "method"
Result: TypeAlias = dict[str, Any]
Step: TypeAlias = Callable[[], object]


class Cost(NamedTuple):
    """A line for every cell: what is compared with what, and what a line says beside the ratio."""

    compared: str
    # The cells of a size: smoke, cpu or gpu.
    cells: Callable[[str], Sequence[Cell]]
    measure: Callable[[Cell, Path], Result]
    case: Callable[[Cell], str]
    also: Callable[[Result], str] = lambda _: ""


def compared(
    plain: Step,
    method: Step,
    repeats: int,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    **others: Step,
) -> Result:
    """Seconds of every side, in turn, and the ratio of the medians.

    The first steps, which allocate memory and warm caches, are left out.
    """
    kept = alternated({PLAIN: plain, METHOD: method, **others}, repeats, warm_up, clock)
    return {
        "seconds": {name: quartiles(values) for name, values in kept.items()},
        "ratio": round(median(kept[METHOD]) / median(kept[PLAIN]), 4),
    }


def of_sides(plain: Any, method: Any) -> Mapping[str, Any]:
    """A figure of both sides."""
    return {PLAIN: plain, METHOD: method}
