"""The one setting of a watch, and its price."""

from __future__ import annotations

from dataclasses import dataclass

from service.watch.limits import LEAST_SPACING, delay_of, limit_of

DAYS = 365.25 / 12


@dataclass(frozen=True)
class Price:
    """Answers, and days, until a change of one standard deviation of one stream is found: what a budget
    costs."""

    scans: float
    days: float

    def __str__(self) -> str:
        days = f"{self.days:.1f} days" if self.days < 10 else f"{self.days:.0f} days"
        return f"a change of one standard deviation is found after about {self.scans:.0f} scans ({days})"


@dataclass(frozen=True)
class Budget:
    """Months between false alarms of one hospital and model, over all its streams together.

    Each of the streams has an equal part of the rate of false alarms (Bonferroni). The spacing of all
    together is then what was set where streams do not move together, and longer where they do. Silence is no
    stream: what it may add is one part more, and it uses little of that, since a day is silent or not.
    """

    months: float = 12.0
    streams: int = 1

    def spacing(self, per_day: float) -> float:
        """Answers between false alarms of a stream that gets so many answers a day, at least 10.

        Rounded to two digits, so that a limit seldom changes with a rate that is counted as the days go by.
        Raises ValueError where nothing comes.
        """
        if per_day <= 0:
            raise ValueError(f"watch: expected some answers a day, found {per_day}")
        return max(LEAST_SPACING, float(f"{self._days * per_day:.1e}"))

    @property
    def daily(self) -> float:
        """The probability of a false alarm that one decision a day may have, as of silence."""
        return 1 / self._days

    def price(self, per_day: float) -> Price:
        """Answers and days from a change to its alarm, where the series has been long."""
        scans = delay_of(limit_of(self.spacing(per_day)))
        return Price(scans, scans / per_day)

    @property
    def _days(self) -> float:
        return self.months * DAYS * self.streams
