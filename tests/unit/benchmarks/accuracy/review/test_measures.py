"""What a doubt is worth, on cases worked out by hand and against sorted lists."""

from __future__ import annotations

import math
from itertools import permutations
from statistics import fmean

import numpy as np
import pytest

from benchmarks.accuracy.review.measures import Fit, auc, found, risks, worth

LOST = np.array([0.0, 0.1, 0.2, 0.3, 0.4])


def test_a_fifth_looked_at_finds_what_stands_first() -> None:
    assert found(LOST, LOST) == pytest.approx(0.4)
    assert found(LOST, -LOST) == 0
    # Six answers: a fifth is rounded up to two.
    assert found(np.array([0.5, 0.3, 0.2, 0, 0, 0]), np.array([6, 1, 5, 4, 3, 2])) == pytest.approx(0.7)
    assert math.isnan(found(np.zeros(5), LOST))


def test_equal_doubts_count_as_the_mean_over_all_orders() -> None:
    lost, doubt = [0.1, 0.9, 0.4, 0.6], [1, 2, 2, 0]
    shares, risk = [], []
    for order in permutations(range(4)):
        ranked = sorted(order, key=lambda index: -doubt[index])
        shares.append(lost[ranked[0]] / sum(lost))
        kept = [lost[index] for index in reversed(ranked)]
        risk.append([fmean(kept[: n + 1]) for n in range(4)])
    assert found(np.array(lost), np.array(doubt, float)) == pytest.approx(fmean(shares))
    assert risks(np.array(lost), np.array(doubt, float)) == pytest.approx(np.mean(risk, axis=0))


def test_risk_coverage_of_an_oracle_is_never_above_another() -> None:
    lost, doubt = np.random.default_rng(1).random((2, 50))
    assert (risks(lost, lost) <= risks(lost, doubt) + 1e-12).all()
    assert risks(lost, doubt)[-1] == pytest.approx(lost.mean())
    assert worth(lost, doubt).aurc >= worth(lost, lost).aurc


def test_auc_counts_pairs() -> None:
    lost, doubt = np.random.default_rng(2).random((2, 40))
    doubt = doubt.round(1)
    worst = {*np.argsort(-lost)[:10].tolist()}
    pairs = [
        1.0 if doubt[bad] > doubt[good] else 0.5 * (doubt[bad] == doubt[good])
        for bad in worst
        for good in {*range(40)} - worst
    ]
    assert auc(lost, doubt) == pytest.approx(fmean(pairs))
    assert auc(lost, lost) == 1
    assert math.isnan(auc(np.ones(4), np.arange(4.0)))


def test_a_fit_finds_what_loss_is_made_of_and_gives_no_weight_below_0() -> None:
    one, other, noise = np.random.default_rng(3).random((3, 200))
    fit = Fit.of(
        0.3 + 2 * one + 0.5 * other - noise, {"one": one, "other": other, "noise": noise, "flat": 0 * one}
    )
    assert fit.weights["one"] == pytest.approx(2, abs=0.2)
    assert fit.weights["other"] == pytest.approx(0.5, abs=0.2)
    assert fit.weights["noise"] == fit.weights["flat"] == 0
    again = fit({"one": one + 1, "other": other, "noise": noise, "flat": noise})
    assert again == pytest.approx(
        fit({"one": one, "other": other, "noise": noise, "flat": one}) + fit.weights["one"]
    )
