"""Prediction-powered inference of a mean (PPI++, Angelopoulos, Duchi and Zrnic, arXiv 2311.01453).

Legend: n patients with a mask and a Dice y, N patients without; f is a predictor that both have, such as the
rank of the answer's confidence.

    mean = mean_n(y) - lambda (mean_n(f) - mean_N(f))           lambda = cov_n(y, f) / ((1 + n / N) var(f))

The masks keep the mean unbiased whatever f is, and lambda is 0 where f says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from personalization.acceptance.bounds import lower_bound
from personalization.errors import LabelError


@dataclass(frozen=True)
class Powered:
    """The mean with `others` patients without masks, and what they are worth.

    Attributes:
        mean: the estimate.
        lower_bound: as that of the masks alone (`bounds.lower_bound`).
        weight: lambda.
        others: N.
        as_many_as: masks that would give the same variance without the predictor.
    """

    mean: float
    lower_bound: float
    weight: float
    others: int
    as_many_as: float


def powered(dice: Sequence[float], predicted: Sequence[float], others: Sequence[float]) -> Powered:
    """Estimate the mean of `dice` [n], of which `predicted` [n] and `others` [N] have the predictor.

    Raises LabelError for fewer patients than a bound needs, none without masks, or other lengths.
    """
    y, own, rest = (np.asarray(each, np.float64) for each in (dice, predicted, others))
    if len(y) != len(own) or not len(rest):
        raise LabelError(
            f"predictor: expected {len(y)} values beside masks and at least one without, found {len(own)} "
            f"and {len(rest)}"
        )
    n, others_count = len(y), len(rest)
    spread = float(np.concatenate([own, rest]).var(ddof=1))
    weight = 0.0
    if spread > 0:
        shared = float(((y - y.mean()) * (own - own.mean())).mean())
        weight = max(shared / ((1 + n / others_count) * spread), 0.0)
    adjusted = y - weight * (own - rest.mean())
    more = weight**2 * float(rest.var()) / others_count
    alone, together = float(y.var(ddof=1)) / n, float(adjusted.var(ddof=1)) / n + more
    return Powered(
        float(adjusted.mean()),
        lower_bound(adjusted.tolist(), more),
        weight,
        others_count,
        n * alone / together if together > 0 else float(n),
    )
