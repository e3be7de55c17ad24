"""Mean differences and their intervals, beside scipy's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from training.paired import PairedSums, over_sites

DRAW = np.random.default_rng(4)
SMALL, LARGE = DRAW.normal(0.1, 0.3, 5), DRAW.normal(-0.2, 0.05, 23)


def sums(changes: Sequence[float] | NDArray[np.float64]) -> PairedSums:
    return PairedSums.of(np.zeros(len(changes)), changes)


def test_interval_of_one_group_is_students() -> None:
    found = over_sites([sums(SMALL)])
    expected = stats.ttest_1samp(SMALL, 0).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert found.change == pytest.approx(SMALL.mean())


def test_interval_of_two_hospitals_is_welchs() -> None:
    found = over_sites([sums(SMALL), sums(LARGE)])
    # The mean of two means is half of the difference of one and the other's negative.
    expected = stats.ttest_ind(SMALL, -LARGE, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(expected.low / 2), pytest.approx(expected.high / 2))
    assert found.change == pytest.approx((SMALL.mean() + LARGE.mean()) / 2)
    assert found.count == 28


def test_interval_holds_in_as_many_draws_as_it_says() -> None:
    draw = np.random.default_rng(0)
    sites = ((6, 0.3, 0.1), (12, 0.05, 0.0), (7, 0.1, -0.4))
    held = 0
    for _ in range(1000):
        found = over_sites([sums(draw.normal(mean, spread, n)) for n, spread, mean in sites])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= -0.1 <= found.high
    assert 935 <= held <= 970


def test_a_hospital_with_one_patient_has_no_interval() -> None:
    found = over_sites([sums(LARGE), sums([0.5])])
    assert (found.low, found.high, found.count) == (None, None, 24)
    assert found.change == pytest.approx((LARGE.mean() + 0.5) / 2)


def test_equal_differences_have_an_interval_without_width() -> None:
    found = over_sites([sums([0.25, 0.25]), sums([0.5, 0.5])])
    assert (found.change, found.low, found.high) == (0.375, 0.375, 0.375)
