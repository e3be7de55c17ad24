"""Simulated hospitals, watched by the code that serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.watch import Arrivals, Budget, Level, Share
from service.watch.cusum import Sum
from service.watch.limits import K

Values = NDArray[np.float64]

LEVELS = 3
SHARES = (0.02, 0.1, 0.3)
STREAMS = LEVELS + len(SHARES)
# Of working days and of the weekend; their mean over a week is 1.
BUSY, QUIET = 1.2, 0.5
NAMES = np.array(["working day", "weekend"])
_ANSWERS = 1024


@dataclass(frozen=True)
class Days:
    """Arrivals day by day (n,), and the days of all answers; day 0 is a Monday."""

    counts: NDArray[np.int64]

    @classmethod
    def drawn(cls, rng: np.random.Generator, per_day: float, days: int) -> Days:
        """Poisson arrivals, fewer on weekends."""
        busy = np.where(np.arange(days) % 7 < 5, BUSY, QUIET)
        return cls(rng.poisson(per_day * busy))

    @property
    def of_answers(self) -> NDArray[np.int64]:
        """The day of every answer."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def weekend(day: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which days are Saturdays and Sundays."""
    found: NDArray[np.bool_] = day % 7 >= 5
    return found


def _mixed(rng: np.random.Generator, shape: tuple[int, ...]) -> Values:
    second = rng.random(shape) < 0.4
    return np.where(second, 2.5 + 0.5 * rng.standard_normal(shape), rng.standard_normal(shape))


def _zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> Values:
    return np.where(rng.random(shape) < 0.6, 0.0, np.exp(rng.standard_normal(shape)))


# Standard deviations of the normal's mean on a weekend, and from day to day.
WEEKEND, FROM_DAY_TO_DAY = 0.5, 0.3
TOGETHER = 0.9
LAWS: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], Values]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "skewed": lambda rng, shape: rng.lognormal(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(3, shape),
    "two scanners": _mixed,
    "zeros": _zeros,
}
PLAIN, WEEKLY, WEEKLY_AS_ONE, DAILY, MOVES_TOGETHER = "normal", "weekly", "weekly as one", "daily", "together"
DEVIATIONS: Mapping[str, float] = {
    "normal": 1.0,
    "skewed": float(np.sqrt((np.e - 1) * np.e)),
    "heavy tails": float(np.sqrt(3)),
}


def levels(rng: np.random.Generator, law: str, day: NDArray[np.int64]) -> Values:
    """Values (LEVELS, n) of answers on these days."""
    shape = (LEVELS, len(day))
    values = LAWS.get(law, LAWS[PLAIN])(rng, shape)
    if law in (WEEKLY, WEEKLY_AS_ONE):
        values += WEEKEND * weekend(day)
    elif law == DAILY:
        values += FROM_DAY_TO_DAY * rng.standard_normal((LEVELS, int(day[-1]) + 1))[:, day]
    elif law == MOVES_TOGETHER:
        shared = rng.standard_normal(len(day))
        values = np.sqrt(TOGETHER) * shared + np.sqrt(1 - TOGETHER) * values
    return values


def false_alarms(
    rng: np.random.Generator, law: str, per_day: float, years: int, budget: Budget
) -> Counter[str]:
    """Alarms by kind of one hospital without a change; each begins a new series with the next day."""
    days = Days.drawn(rng, per_day, round(365.25 * years))
    day = days.of_answers
    values = levels(rng, law, day)
    yes = rng.random((len(SHARES), len(day))) < np.array(SHARES)[:, None]
    strata = NAMES[weekend(day).astype(int)] if law == WEEKLY else None
    ends = np.concatenate([[0], np.cumsum(days.counts)])
    spacing, stride = budget.spacing(per_day), max(1, round(_ANSWERS / per_day))
    found: Counter[str] = Counter()
    today = 0
    while today < len(days.counts):
        began = ends[today]
        watched: list[tuple[str, Level | Share, NDArray[np.generic]]] = [
            *(("level", Level(), row) for row in values),
            *(("share", Share(), row) for row in yes),
        ]
        arrivals, alarm = Arrivals(), None
        while today < len(days.counts) and alarm is None:
            until = min(today + stride, len(days.counts))
            part = slice(ends[today], ends[until])
            alarms = []
            for kind, stream, row in watched:
                if isinstance(stream, Share):
                    raised = stream.take(row[part], spacing)
                else:
                    raised = stream.take(row[part], spacing, None if strata is None else strata[part])
                if raised:
                    alarms.append((int(day[began + raised.at - 1]), kind))
            for each in range(today, until):
                arrivals = arrivals.after(each % 7, int(days.counts[each]))
                if arrivals.probability < budget.daily:
                    alarms.append((each, "silence"))
            alarm = min(alarms, default=None)
            today = until if alarm is None else alarm[0] + 1
        if alarm:
            found[alarm[1]] += 1
    return found


MOST = 1000


def delays(
    rng: np.random.Generator,
    law: str,
    by_weekday: bool,
    shift: float,
    before: int,
    per_day: int,
    spacing: float,
) -> int | None:
    """Answers from a shift, in standard deviations of the law, to its alarm; `MOST` where it was not found.

    The shift comes after so many answers, at `per_day` a day. None where an alarm came before it.
    """
    values = LAWS[law](rng, (before + MOST,))
    values[before:] += shift * DEVIATIONS[law]
    strata = [str(number // per_day % 7) for number in range(len(values))] if by_weekday else None
    return _delay(Level(), values, before, spacing, strata)


def share_delays(
    rng: np.random.Generator, usual: float, changed: float, before: int, spacing: float
) -> int | None:
    """The same for a share of answers that changes."""
    draws = rng.random(before + MOST)
    draws[:before] = draws[:before] < usual
    draws[before:] = draws[before:] < changed
    return _delay(Share(), draws.astype(bool), before, spacing, None)


def _delay(
    stream: Level | Share, values: NDArray[np.generic], before: int, spacing: float, strata: list[str] | None
) -> int | None:
    if isinstance(stream, Share):
        early, found = (stream.take(part, spacing) for part in np.split(values, [before]))
    else:
        early = stream.take(values[:before], spacing, strata and strata[:before])
        found = stream.take(values[before:], spacing, strata and strata[before:])
    if early:
        return None
    return found.at - before if found else MOST


def days_of_silence(rng: np.random.Generator, per_day: float, weeks: int, budget: Budget) -> int:
    """Working days without a scan until an alarm, from a Monday, after weeks with scans on working days."""
    arrivals = Arrivals()
    for day in range(7 * weeks):
        arrivals = arrivals.after(day % 7, int(rng.poisson(per_day)) if day % 7 < 5 else 0)
    day = 0
    while True:
        arrivals = arrivals.after(day % 7, 0)
        if arrivals.probability < budget.daily:
            return sum(earlier % 7 < 5 for earlier in range(day + 1))
        day += 1


def run_length(rng: np.random.Generator, limit: float, shift: float) -> int:
    """Answers until a two-sided sum of normal numbers reaches the limit."""
    up = down = Sum()
    taken = 0
    while True:
        scores = rng.standard_normal(256) + shift
        up, upper = up.after((scores - K).tolist(), taken + 1)
        down, lower = down.after((-scores - K).tolist(), taken + 1)
        reached = np.flatnonzero(np.maximum(upper, lower) >= limit)
        if len(reached):
            return taken + int(reached[0]) + 1
        taken += len(scores)
