"""What a doubt is worth: how much of the loss it finds, risk-coverage and AUC; and fits of several doubts.

Answers of equal doubt count by their mean loss, so that nothing depends on their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.stats import rankdata

# The share of answers that a hospital looks at, and of those that are the worst.
LOOKED_AT, WORST = 0.2, 0.25
Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Worth:
    """The worth of a doubt: share of the loss found, an oracle's, AURC, AUC of the worst quarter."""

    found: float
    oracle: float
    aurc: float
    auc: float


def worth(lost: Values, doubt: Values) -> Worth:
    """Of answers that lost so much, in 0..1 each."""
    return Worth(found(lost, doubt), found(lost, lost), float(risks(lost, doubt).mean()), auc(lost, doubt))


def found(lost: Values, doubt: Values, share: float = LOOKED_AT) -> float:
    """Share of all that is lost among the answers named first; NaN where nothing is lost."""
    if not lost.sum():
        return math.nan
    first = math.ceil(share * len(lost))
    return float(_in_order(lost, doubt)[:first].sum() / lost.sum())


def risks(lost: Values, doubt: Values) -> Values:
    """[n]: the mean loss of the 1, 2, ... n answers of the least doubt."""
    kept = _in_order(lost, doubt)[::-1]
    return np.asarray(np.cumsum(kept) / np.arange(1, len(kept) + 1), np.float64)


def auc(lost: Values, doubt: Values) -> float:
    """That an answer of the worst quarter has more doubt than another; NaN where there is no other."""
    bad = lost >= np.sort(lost)[-math.ceil(WORST * len(lost))]
    count = int(bad.sum())
    if count == len(lost):
        return math.nan
    above = rankdata(doubt)[bad].sum() - count * (count + 1) / 2
    return float(above / (count * (len(lost) - count)))


def _in_order(lost: Values, doubt: Values) -> Values:
    """The losses, largest doubt first."""
    _, group = np.unique(-doubt, return_inverse=True)
    mean = np.bincount(group, weights=lost) / np.bincount(group)
    return np.asarray(mean[np.sort(group)], np.float64)


@dataclass(frozen=True)
class Fit:
    """A sum of standardised doubts with weights of at least 0."""

    middles: Mapping[str, float]
    weights: Mapping[str, float]

    @classmethod
    def of(cls, lost: Values, doubts: Mapping[str, Values]) -> Fit:
        """Least squares of the loss, with an intercept, which changes no order and is left out."""
        middles = {name: float(doubt.mean()) for name, doubt in doubts.items()}
        scales = {name: float(doubt.std()) or 1.0 for name, doubt in doubts.items()}
        columns = np.stack([(doubts[name] - middles[name]) / scales[name] for name in doubts], axis=1)
        solved, _ = nnls(columns, lost - lost.mean())
        return cls(
            middles,
            {name: float(weight) / scales[name] for name, weight in zip(doubts, solved, strict=True)},
        )

    def __call__(self, doubts: Mapping[str, Values]) -> Values:
        """The doubt that the fit makes of others."""
        parts = [self.weights[name] * (doubts[name] - self.middles[name]) for name in self.weights]
        return np.asarray(sum(parts), np.float64)
