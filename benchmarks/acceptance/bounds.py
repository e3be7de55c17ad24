"""Lower bounds of a mean from few patients, each as a function of draws [m, n] that gives [m].

Legend: m draws, n patients, g the skewness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import special

from personalization.acceptance import lower_bound
from personalization.acceptance.bounds import CONFIDENCE

Values = NDArray[np.float64]
Bound = Callable[[Values], Values]
_RESAMPLES = 999
# Dice of 0 and 1 have no logit.
_NEAR = 0.005


def student(draws: Values) -> Values:
    """Student's t."""
    return np.asarray(draws.mean(axis=1) - _quantile(draws) * _error(draws))


def johnson(draws: Values) -> Values:
    """Student's t, moved by the skewness (Johnson, JASA 1978): g s / (6 n) is added."""
    n, s = draws.shape[1], draws.std(axis=1, ddof=1)
    return np.asarray(student(draws) + _skewness(draws) * s / (6 * n))


def hall(draws: Values) -> Values:
    """Student's t through a monotone cubic that removes the skewness (Hall, JRSS B 1992)."""
    n, g = draws.shape[1], _skewness(draws)
    slope = np.where(np.abs(g) < 1e-6, 1e-6, g / 3)
    away = _quantile(draws) - g / (6 * n**0.5)
    inverse = (np.cbrt(1 + 3 * slope * away / n**0.5) - 1) * n**0.5 / slope
    return np.asarray(draws.mean(axis=1) - inverse * _error(draws))


def bootstrap_t(draws: Values) -> Values:
    """The quantile of the studentised mean over resamples (Efron 1979), 0 where it is not finite."""
    n, rank = draws.shape[1], int(np.ceil(CONFIDENCE * (_RESAMPLES + 1))) - 1
    chosen = np.random.default_rng(1).integers(0, n, (_RESAMPLES, n))
    bounds = np.zeros(len(draws))
    for index, own in enumerate(draws):
        again = own[chosen]
        difference, error = again.mean(axis=1) - own.mean(), _error(again)
        with np.errstate(divide="ignore", invalid="ignore"):
            studentised = np.where(error > 0, difference / error, np.sign(difference) * np.inf)
        quantile = np.sort(np.nan_to_num(studentised, nan=0.0, posinf=np.inf, neginf=-np.inf))[rank]
        if np.isfinite(quantile):
            bounds[index] = own.mean() - quantile * own.std(ddof=1) / n**0.5
    return bounds


def logits(draws: Values) -> Values:
    """Student's t of the logits, taken back: it bounds the median of a symmetric law of logits."""
    return np.asarray(special.expit(student(special.logit(np.clip(draws, _NEAR, 1 - _NEAR)))))


def logit_of_mean(draws: Values) -> Values:
    """Student's t of the mean's logit, by the delta method."""
    mean = np.clip(draws.mean(axis=1), _NEAR, 1 - _NEAR)
    away = _quantile(draws) * _error(draws) / (mean * (1 - mean))
    return np.asarray(special.expit(special.logit(mean) - away))


def with_one_unseen(draws: Values) -> Values:
    """What an acceptance gives (`personalization.acceptance.lower_bound`)."""
    return np.array([lower_bound(own.tolist()) for own in draws])


BOUNDS: Mapping[str, Bound] = {
    "t": student,
    "Johnson": johnson,
    "Hall": hall,
    "bootstrap-t": bootstrap_t,
    "t of logits": logits,
    "logit of mean": logit_of_mean,
    "one unseen": with_one_unseen,
}


def _quantile(draws: Values) -> float:
    return float(special.stdtrit(draws.shape[1] - 1, CONFIDENCE))


def _error(draws: Values) -> Values:
    return np.asarray(draws.std(axis=1, ddof=1) / draws.shape[1] ** 0.5)


def _skewness(draws: Values) -> Values:
    """0 of equal values."""
    away = draws - draws.mean(axis=1, keepdims=True)
    s = draws.std(axis=1, ddof=1)
    return np.asarray(np.divide((away**3).mean(axis=1), s**3, out=np.zeros_like(s), where=s > 0))
