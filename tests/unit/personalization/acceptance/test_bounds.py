"""Bounds of few patients, beside tables, a quadrature and hand-computed cases."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from personalization.acceptance import lower_bound, powered, share_bound
from personalization.errors import LabelError

DICE = [0.91, 0.93, 0.88, 0.95, 0.9, 0.94, 0.92, 0.6, 0.89, 0.93, 0.9, 0.95]
RANKS = [0.5, 0.7, 0.2, 0.9, 0.4, 0.8, 0.6, 0.05, 0.3, 0.75, 0.45, 0.95]
OTHERS = [0.1, 0.15, 0.25, 0.35, 0.55, 0.65, 0.85, 1.0]


def test_lower_bound_is_students_with_one_patient_more() -> None:
    """The worst is 0.315 below the median of 0.915, so the unseen patient has 0.285."""
    values = [*DICE, 0.285]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.90).low
    assert lower_bound(DICE) == pytest.approx(expected, abs=1e-12)


def test_lower_bound_moves_with_its_values() -> None:
    assert lower_bound([value / 2 + 0.1 for value in DICE]) == pytest.approx(lower_bound(DICE) / 2 + 0.1)
    assert lower_bound([0.9] * 10) == pytest.approx(0.9)


def test_too_few_or_unknown_values_have_no_bound() -> None:
    with pytest.raises(LabelError, match="at least 10"):
        lower_bound(DICE[:9])
    with pytest.raises(LabelError, match="finite"):
        lower_bound([*DICE, float("nan")])


@pytest.mark.parametrize(("count", "of"), [(0, 10), (1, 12), (5, 40), (12, 12)])
def test_share_bound_is_clopper_and_pearsons(count: int, of: int) -> None:
    expected = stats.binomtest(count, of, alternative="less").proportion_ci(0.95).high
    assert share_bound(count, of) == pytest.approx(expected, abs=1e-9)


def test_powered_is_what_ppi_python_says() -> None:
    """Figures of ppi_py 0.2.3: ppi_mean_pointestimate(DICE, RANKS, OTHERS), and its lambda."""
    found = powered(DICE, RANKS, OTHERS)
    assert found.mean == pytest.approx(0.8864761904761905, abs=1e-9)
    assert found.weight == pytest.approx(0.08304761904761726, abs=1e-9)
    assert found.as_many_as > len(DICE)


def test_a_predictor_that_says_nothing_costs_nothing() -> None:
    found = powered(DICE, [0.5] * len(DICE), [0.5] * 8)
    assert (found.mean, found.weight) == (pytest.approx(np.mean(DICE)), 0.0)
    assert found.lower_bound == pytest.approx(lower_bound(DICE))
    assert found.as_many_as == pytest.approx(len(DICE))
    # One that is wrong about the order is not turned round.
    assert powered(DICE, [1 - rank for rank in RANKS], OTHERS).weight == 0


def test_powered_needs_patients_without_masks() -> None:
    with pytest.raises(LabelError, match="at least one without"):
        powered(DICE, RANKS, [])
