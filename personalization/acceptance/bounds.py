"""One-sided bounds of a mean and of a share over few patients.

Dice is skewed: most patients are near the best, and few are far below. A sample of twelve often has none of
the few, so that Student's t promises too much: of recorded patients its bound of 95 % held in 82 to 96 % of
draws. `benchmarks run acceptance` compares it with Johnson's and Hall's corrections, the bootstrap-t, scales,
and `lower_bound`, which is the only one that holds in 93 % at n = 12 for every recorded set.

Legend: n patients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy import special

from personalization.errors import LabelError

CONFIDENCE: Final = 0.95
FEWEST: Final = 10
"""Patients below which no bound is given: what the sample does not have decides there."""


def lower_bound(values: Sequence[float], more: float = 0.0) -> float:
    """The bound below the mean of a skewed figure, 95 % sure by itself.

    Student's t of the n values and of one patient more, who was not seen and is as far below the worst as the
    worst is below the median:

        x_{n+1} = 2 min(x) - median(x),      mean(x) - t_{n, 0.95} s / sqrt(n + 1)      over all n + 1

    Where some patients in a hundred fail altogether and none is among the n, no bound from the n can know it.

    Args:
        values: of patients who were drawn alike, at least `FEWEST`.
        more: a further variance of the mean, as of what is estimated beside it.

    Raises LabelError for fewer, or for a value that is not finite.
    """
    found = np.asarray(values, np.float64)
    if len(found) < FEWEST or not np.isfinite(found).all():
        raise LabelError(f"values: expected at least {FEWEST} finite numbers, found {[*values]}")
    unseen = 2 * found.min() - np.median(found)
    with_one = np.append(found, unseen)
    n = len(with_one)
    variance = float(with_one.var(ddof=1)) / n + more
    return float(with_one.mean() - special.stdtrit(n - 1, CONFIDENCE) * math.sqrt(variance))


def share_bound(count: int, of: int) -> float:
    """The bound above a share of `count` in `of`, 95 % sure: Clopper and Pearson's (Biometrika 1934)."""
    if count >= of:
        return 1.0
    return float(special.betaincinv(count + 1, of - count, CONFIDENCE))
