"""What the watch would have called: recorded answers of a hospital, as they are and then behind a scanner.

Each replay draws, with replacement, answers as they are and then answers of one rung. The streams are the
logarithm of R, the soft Dice confidence and empty answers, by the service's own sums; the budget is that of
the service's five streams of one label, 12 months and 20 scans a day. A rung counts as a loss where its mean
Dice is ten points or more below that as they are, and as none below one point.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.accuracy.review.hospital import SCALE
from benchmarks.harness.cells import Row
from benchmarks.harness.tables import table
from service.watch import Budget, Level, Share

USUAL, WITHIN, REPEATS = 300, 30, 20
_PER_DAY, _STREAMS = 20, 5
_LOSS, _NONE = 0.10, 0.01
_GOAL = 0.9


@dataclass
class _Called:
    """Replays of one set that called within `WITHIN` answers, and all; and rungs that were mostly missed."""

    losses: list[float] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


def section(rows: Sequence[Row]) -> list[str]:
    """The part of the page."""
    by_set: dict[str, _Called] = {}
    for row in rows:
        cell = row["cell"]
        own = by_set.setdefault(cell["set"], _Called())
        outside: Mapping[str, Mapping[str, list[int]]] = row["result"]["outside"]
        usual = outside["0"]
        for rung, answers in outside.items():
            lost = (np.mean(usual["dice"]) - np.mean(answers["dice"])) / SCALE
            if rung == "0" or _NONE <= lost < _LOSS:
                continue
            seed = zlib.crc32(f"{cell['set']} {cell['site']} {cell['seed']} {rung}".encode())
            share = called(usual, answers, seed)
            (own.losses if lost >= _LOSS else own.calm).append(share)
            if lost >= _LOSS and share < _GOAL:
                own.missed.append(f"{cell['site']} {rung} ({100 * lost:.0f} points, {100 * share:.0f} %)")
    lines = [
        [
            name,
            str(len(own.losses)),
            _hundredths(own.losses),
            str(len(own.calm)),
            _hundredths(own.calm),
        ]
        for name, own in by_set.items()
    ]
    missed = [f"{name}: {', '.join(own.missed)}" for name, own in by_set.items() if own.missed]
    return [
        "## What the watch would have called",
        f"Recorded answers, drawn again {REPEATS} times: {USUAL} as they are, then up to {WITHIN} behind one "
        f"scanner or change, at one false alarm in 12 months and {_PER_DAY} scans a day. In hundredths, the "
        f"replays with an alarm within {WITHIN} answers.",
        table(
            ("set", "losses of ten points", "called", "losses below one point", "called"),
            lines,
        ),
        f"Asked for: {100 * _GOAL:.0f} of the losses. Below that were {'; '.join(missed) or 'none'}.",
    ]


def called(usual: Mapping[str, Sequence[int]], answers: Mapping[str, Sequence[int]], seed: int) -> float:
    """The share of replays in which the watch calls within `WITHIN` answers of a rung."""
    draw = np.random.default_rng(seed)
    spacing = Budget(12, _STREAMS).spacing(_PER_DAY)
    found = 0
    for _ in range(REPEATS):
        streams: dict[str, Any] = {"R": Level(), "sdc": Level(), "empty": Share()}
        before = draw.integers(0, len(usual["dice"]), USUAL)
        after = draw.integers(0, len(answers["dice"]), WITHIN)
        alarms = False
        for name, stream in streams.items():
            if name not in usual or None in (*usual[name], *answers[name]):
                continue
            stream.take(np.array(usual[name], np.float64)[before], spacing)
            alarms |= stream.take(np.array(answers[name], np.float64)[after], spacing) is not None
        found += alarms
    return found / REPEATS


def _hundredths(shares: Sequence[float]) -> str:
    return f"{100 * np.mean(shares):.0f}" if shares else "-"
