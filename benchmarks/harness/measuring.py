"""Measurement of cost: alternated timing, medians with quartiles, and peak memory."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from typing import Any, TypeVar

import psutil

Result = TypeVar("Result")


def alternated(
    steps: Mapping[str, Callable[[], object]],
    repeats: int,
    warm_up: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every step by the clock, run in turn `repeats` times after `warm_up` rounds not kept.

    The steps alternate, so that other load on the machine disturbs all of them alike. Their order is turned
    from round to round, so that the state that one leaves favours no other.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(warm_up + repeats):
        for name, step in [*steps.items()][:: -1 if number % 2 else 1]:
            began = clock()
            step()
            seconds[name].append(clock() - began)
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


def in_new_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """The function's result in a spawned process: a forked one has its parent's peak of memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def family(apart: int | None = None) -> list[psutil.Process]:
    """This process and all below it, without the one of which the number is `apart`.

    Worker processes are no children: the server that forks them is (`training.processes`).
    """
    here = psutil.Process()
    return [here, *(each for each in here.children(recursive=True) if each.pid != apart)]


def processor_seconds(processes: Iterable[psutil.Process]) -> float:
    """Processor seconds of the processes, together; one that is gone counts nothing."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
