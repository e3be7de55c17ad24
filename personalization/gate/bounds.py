"""One-sided bounds of the mean change of Dice, from a few patients with masks.

Legend: n patients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from personalization.errors import LabelError

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Bounds:
    """A mean over `n` patients, with the bound below and the bound above it, each 95 % sure by itself."""

    mean: float
    low: float
    high: float
    n: int


def bounds(changes: Sequence[float]) -> Bounds:
    """Student's t for the mean of n changes, at least two, drawn alike.

        mean -+ t_{n-1, 0.95} s / sqrt(n)

    The bound of n = 2 is 6.3 standard errors away. One patient bounds nothing: -1 and 1. Raises LabelError
    for none, or for a change that is not finite.
    """
    values = np.asarray(changes, dtype=np.float64)
    if not values.size or not np.isfinite(values).all():
        raise LabelError(f"changes: expected at least one finite number, found {list(changes)}")
    n, mean = len(values), float(values.mean())
    if n < 2:
        return Bounds(mean, -1.0, 1.0, n)
    away = float(special.stdtrit(n - 1, CONFIDENCE) * values.std(ddof=1)) / math.sqrt(n)
    return Bounds(mean, mean - away, mean + away, n)
