"""Silence: nothing arrived on days on which something usually does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log1p
from typing import Any

FORGETS = 0.97
"""What a week keeps of the weeks before: the usual number is that of the last 33 weeks or so."""
_SHAPE = 0.5


@dataclass(frozen=True)
class Arrivals:
    """How many scans arrived by weekday (0 is Monday), and the days without any since the last one.

    Arrivals of a weekday are Poisson, and its rate has the Gamma prior of shape 1/2 (Jeffreys). So the number
    of a new day is negative binomial, and nothing arrives on it with probability

        (D / (D + 1)) ^ (N + 1/2)

    after N scans on D days of that weekday. A weekday that was never seen does not count. Days of a silence
    enter N and D when scans arrive again.
    """

    scans: tuple[float, ...] = (0.0,) * 7
    days: tuple[float, ...] = (0.0,) * 7
    silent: tuple[int, ...] = ()

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Arrivals:
        """Continue from the JSON of `dataclasses.asdict`."""
        return cls(*(tuple(state[name]) for name in ("scans", "days", "silent")))

    def usual(self, weekday: int) -> float:
        """The usual number of scans on a weekday."""
        return self.scans[weekday] / self.days[weekday] if self.days[weekday] else 0.0

    def after(self, weekday: int, scans: int) -> Arrivals:
        """What is known after a day that has ended. Leave out days on which the hospital is closed."""
        if not scans:
            return Arrivals(self.scans, self.days, (*self.silent, weekday))
        totals, days = list(self.scans), list(self.days)
        for day, number in (*((silent, 0) for silent in self.silent), (weekday, scans)):
            totals[day] = FORGETS * totals[day] + number
            days[day] = FORGETS * days[day] + 1
        return Arrivals(tuple(totals), tuple(days))

    @property
    def probability(self) -> float:
        """How probable it is that nothing arrived since the last scan; 1 where something did on the last day.

        There is an alarm where it is below `Budget.daily`.
        """
        seen = [(self.scans[weekday], self.days[weekday]) for weekday in self.silent if self.days[weekday]]
        return exp(-sum((scans + _SHAPE) * log1p(1 / days) for scans, days in seen))

    def answered(self) -> Arrivals:
        """Forget the days of a silence that had another cause than that nothing came to be done."""
        return Arrivals(self.scans, self.days)
