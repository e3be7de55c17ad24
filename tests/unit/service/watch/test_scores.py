"""Sequential normal scores: against a loop, by all orders of a few values, and with ties."""

from __future__ import annotations

from itertools import permutations
from math import inf, nan

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from service.watch import scores
from service.watch.scores import BOUND, Reference


def by_integral(values: list[float]) -> list[float]:
    """The mean of the normal quantile over each value's cell, by quadrature."""
    found = []
    for i, value in enumerate(values, start=1):
        below = sum(earlier < value for earlier in values[: i - 1])
        equal = sum(earlier == value for earlier in values[: i - 1])
        low, high = below / i, (below + equal + 1) / i
        found.append(quad(norm.ppf, low, high, limit=200)[0] / (high - low))
    return found


def test_scores_are_means_of_the_normal_over_cells() -> None:
    values = [3.0, 1.0, 2.0, 2.0, inf, -5.0, 2.0, -inf]
    assert Reference().score(np.array(values)) == pytest.approx(by_integral(values), abs=1e-6)


def test_scores_agree_with_conovers_where_the_reference_is_large() -> None:
    values = np.random.default_rng(0).normal(size=2000)
    ranks = np.array([(values[: i + 1] <= values[i]).sum() for i in range(len(values))])
    theirs = norm.ppf((ranks - 0.5) / np.arange(1, 2001))
    ours = Reference().score(values)
    assert np.abs(ours - theirs)[500:].max() < 0.12
    assert np.abs(ours - theirs)[500:].mean() < 0.005


@pytest.mark.parametrize("values", [(1, 2, 3, 4, 5), (0, 0, 0, 1, 2), (7, 7, 7, 7, 8)])
def test_over_all_orders_scores_have_mean_zero_and_variance_at_most_one(values: tuple[float, ...]) -> None:
    orders = np.array([Reference().score(np.array(order, float)) for order in permutations(values)])
    assert orders.mean(0) == pytest.approx(np.zeros(5), abs=1e-12)
    assert orders.var(0).max() <= 1
    assert np.cov(orders.T)[3, 4] == pytest.approx(0, abs=0.05)


def test_scores_of_distinct_values_are_uncorrelated_over_all_orders() -> None:
    orders = np.array([Reference().score(np.array(order, float)) for order in permutations(range(6))])
    covariances = np.cov(orders.T)
    assert covariances - np.diag(np.diag(covariances)) == pytest.approx(np.zeros((6, 6)), abs=1e-12)


def test_a_value_that_never_changes_scores_zero() -> None:
    assert not Reference().score(np.full(100, 0.25)).any()


def test_the_law_does_not_matter() -> None:
    values = np.random.default_rng(1).normal(size=300)
    assert (Reference().score(values) == Reference().score(np.exp(3 * values))).all()


def test_many_at_once_are_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "BOUND", 90)
    values = np.random.default_rng(2).integers(0, 40, 200).astype(float)
    one, many, parts = Reference(), Reference(), Reference()
    expected = np.concatenate([one.score(values[i : i + 1]) for i in range(len(values))])
    assert (many.score(values) == expected).all()
    assert (np.concatenate([parts.score(part) for part in np.split(values, [1, 30, 95])]) == expected).all()
    assert (one.values == np.sort(values[:90])).all()
    assert (many.values == one.values).all()


def test_a_reference_continues_from_its_values() -> None:
    values = np.random.default_rng(3).normal(size=120)
    whole, first = Reference(), Reference()
    expected = whole.score(values)[70:]
    first.score(values[:70])
    assert (Reference(first.values).score(values[70:]) == expected).all()
    assert (Reference(values[:70]).score(values[70:]) == expected).all()


def test_memory_is_bounded() -> None:
    reference = Reference()
    reference.score(np.random.default_rng(4).normal(size=2 * BOUND))
    assert len(reference.values) == BOUND


def test_no_number_is_rejected() -> None:
    with pytest.raises(ValueError, match="NaN"):
        Reference().score(np.array([1.0, nan]))
