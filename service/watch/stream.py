"""Streams: one number, or one yes or no, of every answer, watched since the series began.

A series begins with an assignment, and again with a new object where a version changes or a person says that
what raised an alarm is normal now. Its first `REFERENCE` answers say what is usual and raise no alarm.
Scans that are known to be usual beforehand count among these. Answers are numbered from 1.

After an alarm a sum stays above its limit as long as the change lasts, and every answer returns an alarm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv

from service.watch.cusum import Sum
from service.watch.limits import K, limit_of, share_limit_of
from service.watch.scores import Reference

REFERENCE = 50
"""Answers that only say what is usual."""


@dataclass(frozen=True)
class Alarm:
    """A sum reached its limit at answer `at`; what it shows began after answer `since`.

    `up` says whether the values are larger than before, or more of the answers have it. `height` and `limit`
    are in standard deviations of a value, or in answers that have it.
    """

    at: int
    since: int
    up: bool
    height: float
    limit: float


class Level:
    """A number of every answer, such as a volume: two-sided sums of its normal scores, with slack 0.5.

    Values are ranked within their stratum, such as the weekday. A pattern that repeats by stratum then raises
    no alarm; in one stratum for all, a weekend that differs by half a standard deviation raises many. Where
    the answers of a day resemble each other, take their mean as one value, with the spacing of one a day.
    """

    def __init__(self, references: Mapping[str, Reference] | None = None) -> None:
        """Begin a series, after the `references` of scans that are known to be usual, by stratum."""
        self.references = dict(references or {})
        self._known = sum(len(reference.values) for reference in self.references.values())
        self._taken = 0
        self._up = Sum()
        self._down = Sum()

    @classmethod
    def of(cls, state: Mapping[str, Any], references: Mapping[str, Reference]) -> Level:
        """Continue from `state` and the references of that time, to the same bits."""
        level = cls(references)
        level._taken, level._known = state["taken"], state["known"]
        level._up, level._down = Sum(*state["up"]), Sum(*state["down"])
        return level

    @property
    def state(self) -> dict[str, Any]:
        """What changes with every answer, as JSON; the references follow from the values, in any order."""
        return {
            "taken": self._taken,
            "known": self._known,
            "up": [self._up.height, self._up.since],
            "down": [self._down.height, self._down.since],
        }

    def take(self, values: ArrayLike, spacing: float, strata: ArrayLike | None = None) -> Alarm | None:
        """Take the values of the next answers, oldest first; return the first alarm among them.

        `spacing` is the number of answers between false alarms, `strata` those of the values, one where there
        are none. Many values at once give the same bits as one after the other. Raises ValueError for NaN.
        """
        scores = self._scores(np.asarray(values, np.float64), strata)
        warm = min(len(scores), max(0, REFERENCE - self._known - self._taken))
        first = self._taken + warm + 1
        self._taken += len(scores)
        limit = limit_of(spacing)
        self._up, up = _added(self._up, scores[warm:] - K, first, limit, True)
        self._down, down = _added(self._down, -scores[warm:] - K, first, limit, False)
        return min((alarm for alarm in (up, down) if alarm), key=lambda alarm: alarm.at, default=None)

    def strain(self, spacing: float) -> float:
        """The higher sum over the limit of this spacing: 1 or more is an alarm."""
        return max(self._up.height, self._down.height) / limit_of(spacing)

    def _scores(self, values: NDArray[np.float64], strata: ArrayLike | None) -> NDArray[np.float64]:
        if strata is None:
            return self.references.setdefault("", Reference()).score(values)
        scores = np.empty(len(values))
        names = np.asarray(strata, str)
        for name in np.unique(names):
            own = names == name
            scores[own] = self.references.setdefault(str(name), Reference()).score(values[own])
        return scores


class Share:
    """A yes or no of every answer, such as an empty mask: a one-sided Bernoulli sum, for a growing share.

    The sum is made for a share p: the upper end of what the answers so far allow (Clopper and Pearson,
    one-sided, 70 %), since with too low a p false alarms would be frequent. It is chosen after 50 answers and
    at every doubling, and the chain of Brook and Evans is exact between.
    """

    def __init__(self) -> None:
        self._taken = 0
        self._yes = 0
        self._share = 1.0
        self._up = Sum()

    @classmethod
    def after(cls, known: Sequence[bool]) -> Share:
        """Begin a series, after the values of scans that are known to be usual."""
        share = cls()
        share._taken, share._yes, share._up = len(known), sum(known), Sum(since=len(known))
        if len(known) >= REFERENCE:
            share._share = _upper(share._yes, share._taken)
        return share

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Share:
        """Continue from `state`, to the same bits."""
        share = cls()
        share._taken, share._yes, share._share = state["taken"], state["yes"], state["share"]
        share._up = Sum(*state["up"])
        return share

    @property
    def state(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return {
            "taken": self._taken,
            "yes": self._yes,
            "share": self._share,
            "up": [self._up.height, self._up.since],
        }

    def take(self, values: ArrayLike, spacing: float) -> Alarm | None:
        """Take the next answers, oldest first; return the first alarm among them, as `Level.take` does."""
        rest = np.asarray(values, bool)
        found = None
        while len(rest):
            due = _due(self._taken)
            part, rest = np.split(rest, [due - self._taken])
            if self._share <= _MOST:
                known = share_limit_of(self._share, spacing)
                self._up, alarm = _added(self._up, part - known.slack, self._taken + 1, known.limit, True)
                found = found or alarm
            self._taken += len(part)
            self._yes += int(part.sum())
            if self._taken == due:
                self._share = _upper(self._yes, self._taken)
        return found

    def strain(self, spacing: float) -> float:
        """The sum over the limit of this spacing, as `Level.strain`."""
        if self._share > _MOST:
            return 0.0
        return self._up.height / share_limit_of(self._share, spacing).limit


def _added(
    before: Sum, gains: NDArray[np.float64], first: int, limit: float, up: bool
) -> tuple[Sum, Alarm | None]:
    """The sum after the gains of answers `first`, `first` + 1, and so on; its first alarm."""
    after, heights = before.after(gains.tolist(), first)
    if not heights or max(heights) < limit:
        return after, None
    place = next(place for place, height in enumerate(heights) if height >= limit)
    then = before.at(heights, first, place)
    return after, Alarm(first + place, then.since, up, then.height, limit)


# A larger share cannot grow by much: it is not watched, as none is before it is known.
_LEAST, _MOST = 0.005, 0.9
_CONFIDENCE = 0.7


def _due(taken: int) -> int:
    """The number of answers after which p is chosen next: 50, 100, 200, and so on."""
    return REFERENCE << (taken // REFERENCE).bit_length()


def _upper(yes: int, answers: int) -> float:
    """The share with which so many yes or fewer come in 30 of 100 cases.

    Rounded to two digits, so that few limits are computed.
    """
    upper = float(betaincinv(yes + 1, answers - yes, _CONFIDENCE)) if yes < answers else 1.0
    return float(f"{max(upper, _LEAST):.1e}")
