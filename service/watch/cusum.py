"""Cumulative sums that stop at zero (Page, Biometrika 41, 1954)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Sum:
    """A sum, and the number of the answer at which it was last zero: what it shows began after that."""

    height: float = 0.0
    since: int = 0

    def after(self, gains: Sequence[float], first: int) -> tuple[Sum, list[float]]:
        """The sum after the gains of answers `first`, `first` + 1, and so on; its heights after each.

        S_i = max(0, S_{i-1} + gain_i), in this order of operations: many gains at once give the same bits as
        one after the other.
        """
        heights = list(accumulate(gains, _step, initial=self.height))[1:]
        return (self.at(heights, first, len(heights) - 1) if heights else self), heights

    def at(self, heights: Sequence[float], first: int, place: int) -> Sum:
        """The sum after the gain at this place of those that gave the heights."""
        zeros = (first + earlier for earlier in range(place, -1, -1) if not heights[earlier])
        return Sum(heights[place], next(zeros, self.since))


def _step(height: float, gain: float) -> float:
    height += gain
    return height if height > 0 else 0.0
