"""Limits of cumulative sums from the spacing of their false alarms, and delays, by Markov chains.

Brook and Evans (Biometrika 59, 1972): the height of a sum is cut into cells, and the average run length (ARL)
from every cell solves (I - Q) L = 1, Q the transitions that do not alarm. Two sides with one slack and one
limit have 1 / ARL = 1 / ARL_up + 1 / ARL_down (van Dobben de Bruyn, 1968). Textbook (Montgomery, table 9.3;
two-sided, k = 0.5): 168 at h = 4, 465 at h = 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import log

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lu_factor, lu_solve
from scipy.optimize import brentq
from scipy.special import ndtr

K = 0.5
"""The slack of a sum of scores, in standard deviations: half of the change that is found soonest."""
LEAST_SPACING = 10.0
_CELLS = 200
_HIGHEST = 40.0


def spacing_of(limit: float, shift: float = 0.0) -> float:
    """Values from zero until a two-sided sum of normal scores alarms, on average; the mean is `shift`."""
    up, down = (_from_cells(limit, side)[0] for side in (shift, -shift))
    return float(1 / (1 / up + 1 / down))


@lru_cache(maxsize=256)
def limit_of(spacing: float) -> float:
    """The limit h of a two-sided sum with this many values between false alarms: the inverse of `spacing_of`.

    Raises ValueError where the spacing is below 10 values.
    """
    _check(spacing)
    found: float = brentq(lambda h: log(spacing_of(h) / spacing), 0.1, _HIGHEST, xtol=1e-6)
    return found


@lru_cache(maxsize=256)
def delay_of(limit: float, shift: float = 1.0) -> float:
    """Values from a shift of the mean to its alarm, where the sum had run for long without a change."""
    quiet = _transitions(limit, 0.0)
    start = np.zeros(len(quiet))
    start[0] = 1.0
    # How often each cell is visited between two false alarms: where a change finds the sum.
    visits = lu_solve(lu_factor(np.eye(len(quiet)) - quiet), start, trans=1)
    return float(visits @ _from_cells(limit, shift) / visits.sum())


def _from_cells(limit: float, shift: float) -> NDArray[np.float64]:
    """The ARL of the upper side from each cell; the first is zero."""
    stays = _transitions(limit, shift)
    return np.asarray(np.linalg.solve(np.eye(len(stays)) - stays, np.ones(len(stays))), np.float64)


def _transitions(limit: float, shift: float) -> NDArray[np.float64]:
    """Q (cells, cells) of the upper side; the lowest cell is half as wide, and has zero."""
    width = 2 * limit / (2 * _CELLS - 1)
    moves = (np.arange(_CELLS) - np.arange(_CELLS)[:, None]) * width + K - shift
    stays: NDArray[np.float64] = ndtr(moves + width / 2)
    stays[:, 1:] -= ndtr(moves - width / 2)[:, 1:]
    return stays


@dataclass(frozen=True)
class ShareLimit:
    """A Bernoulli sum: one adds 1 - `slack`, zero takes `slack` away; it alarms at `limit`."""

    slack: float
    limit: float


ODDS = 4.0
"""The change of a share that is found soonest: its odds to the fourfold."""
_FINEST = 50


@lru_cache(maxsize=256)
def share_limit_of(share: float, spacing: float) -> ShareLimit:
    """The sum with this many answers between false alarms while the share is `share`, or more of them.

    Reynolds and Stoumbos (Journal of Quality Technology 31, 1999): the slack between p_0 and p_1, of which
    the odds are `ODDS` times those of p_0, is a fraction a / b, so that the sum moves in steps of 1 / b and
    the chain is exact. Raises ValueError where the spacing is below 10 answers, or the share is not between 0
    and 1.
    """
    _check(spacing)
    if not 0 < share < 1:
        raise ValueError(f"watch: expected a share between 0 and 1, found {share}")
    changed = ODDS * share / (1 - share + ODDS * share)
    slack = Fraction(log((1 - share) / (1 - changed)) / log(ODDS)).limit_denominator(_FINEST)
    slack = min(max(slack, Fraction(1, _FINEST)), Fraction(_FINEST - 1, _FINEST))
    low, high = 0, slack.denominator
    while _share_spacing(share, slack, high) < spacing:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _share_spacing(share, slack, middle) >= spacing else (middle, high)
    # Half a step lower: sums of fractions are rounded.
    return ShareLimit(float(slack), (high - 0.5) / slack.denominator)


def _share_spacing(share: float, slack: Fraction, steps: int) -> float:
    """The ARL from zero of a Bernoulli sum that alarms at this many steps of 1 / denominator."""
    cells = np.arange(steps)
    stays = np.zeros((steps, steps))
    stays[cells, np.maximum(0, cells - slack.numerator)] += 1 - share
    up = cells + slack.denominator - slack.numerator
    stays[cells[up < steps], up[up < steps]] += share
    return float(np.linalg.solve(np.eye(steps) - stays, np.ones(steps))[0])


def _check(spacing: float) -> None:
    if spacing < LEAST_SPACING:
        raise ValueError(
            f"watch: expected at least {LEAST_SPACING:.0f} values between false alarms, found {spacing}"
        )
