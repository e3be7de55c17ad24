"""Differences of two models on the same patients: their sums, and the mean with its interval.

Sums of several sites add up. Nothing else of a patient is in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

CERTAINTY = 0.95
_ROUNDING = 1e-6


@dataclass(frozen=True)
class PairedSums:
    """Sums over patients: their number, both models' scores, the change, and its square.

    A score is in 0..1. `change` is that of the second model, `after`, minus the first one, `before`.
    """

    count: float = 0.0
    before: float = 0.0
    after: float = 0.0
    change: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, before: Iterable[float], after: Iterable[float]) -> PairedSums:
        """The sums of some patients' scores, in one order.

        A patient without a target has no score, NaN, where a model finds nothing. It counts 1 for that model
        if the other one has a score, and is left out if neither has.
        """
        pairs = [
            tuple(1.0 if math.isnan(score) else score for score in pair)
            for pair in zip(before, after, strict=True)
            if not all(map(math.isnan, pair))
        ]
        changes = [second - first for first, second in pairs]
        return cls(
            float(len(pairs)),
            math.fsum(first for first, _ in pairs),
            math.fsum(second for _, second in pairs),
            math.fsum(changes),
            math.fsum(change**2 for change in changes),
        )

    @classmethod
    def together(cls, sums: Iterable[PairedSums]) -> PairedSums:
        """The sums of all sites' patients."""
        rows = [each.row for each in sums]
        return cls(*map(math.fsum, zip(*rows, strict=True))) if rows else cls()

    @property
    def row(self) -> tuple[float, float, float, float, float]:
        """All five, in their order."""
        return self.count, self.before, self.after, self.change, self.squares

    def check(self, most: float | None) -> None:
        """Raise ValueError for sums that scores in 0..1 of at most so many patients cannot have."""
        count, room = self.count, _ROUNDING * max(self.count, 1)
        fits = (
            all(map(math.isfinite, self.row))
            and count == int(count)
            and -room <= self.before <= count + room
            and -room <= self.after <= count + room
            and abs(self.change - (self.after - self.before)) <= room
            and -room <= self.squares <= count + room
            # The mean of squares is no less than the square of the mean.
            and self.change**2 <= count * self.squares + room * max(count, 1)
        )
        if not fits or count < 0 or (most is not None and count > most):
            raise ValueError(f"expected sums of scores in 0..1, of {most} at most, found {list(self.row)}")

    def paired(self) -> Paired | None:
        """The means, and the interval of the change; None of no patient."""
        return over_sites([self]) if self.count else None


@dataclass(frozen=True)
class Paired:
    """The mean change of the same patients, between two models.

    `low` and `high` bound it with 95 % certainty (Student's t over patients, or over images of a
    classification); None for fewer than two.
    """

    count: int
    before: float
    after: float
    change: float
    low: float | None
    high: float | None

    @property
    def direction(self) -> int:
        """1 where the interval is above 0, -1 where it is below, and 0 where no change is shown."""
        if self.low is None or self.high is None:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


def over_sites(sites: Sequence[PairedSums]) -> Paired:
    """The means over sites of the means over their patients, of whom each site has one at least.

    With K sites of n_k patients, of which s_k^2 is the variance of the change, and v_k = s_k^2 / n_k, the
    interval is

        mean +- t(df) sqrt(sum_k v_k) / K,    df = (sum_k v_k)^2 / sum_k (v_k^2 / (n_k - 1))

    (Welch and Satterthwaite; for one site it is Student's). There is none where a site has one patient.
    """
    before, after, mean = (
        math.fsum(getattr(each, what) / each.count for each in sites) / len(sites)
        for what in ("before", "after", "change")
    )
    low = high = None
    if all(each.count >= 2 for each in sites):
        parts = [
            max(each.squares - each.change**2 / each.count, 0.0) / (each.count - 1) / each.count
            for each in sites
        ]
        low = high = mean
        if total := math.fsum(parts):
            # By shares of the total: the squares of small variances would be 0.
            shares = zip((part / total for part in parts), sites, strict=True)
            degrees = 1 / math.fsum(share**2 / (each.count - 1) for share, each in shares)
            margin = float(stdtrit(degrees, (1 + CERTAINTY) / 2)) * math.sqrt(total) / len(sites)
            low, high = mean - margin, mean + margin
    return Paired(int(sum(each.count for each in sites)), before, after, mean, low, high)
