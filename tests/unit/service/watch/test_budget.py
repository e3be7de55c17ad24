"""The budget: false alarms of all streams add up to what was set, and the price is said in scans."""

from __future__ import annotations

import pytest

from service.watch import Budget
from service.watch.limits import delay_of, limit_of

YEAR = 365.25


def test_all_streams_together_alarm_once_in_the_months_that_were_set() -> None:
    budget = Budget(months=12, streams=8)
    each = [20, 20, 20, 20, 5, 5, 3, 100]
    yearly = sum(per_day * YEAR / budget.spacing(per_day) for per_day in each)
    assert yearly == pytest.approx(1, rel=0.02)
    assert 8 * budget.daily * YEAR == pytest.approx(1)


def test_a_spacing_seldom_changes_with_the_rate() -> None:
    budget = Budget(months=12, streams=8)
    assert budget.spacing(20.0) == budget.spacing(19.9)
    assert Budget(months=0.1, streams=1).spacing(1) == 10


def test_more_streams_and_longer_spacings_cost_scans() -> None:
    scans = [Budget(*setting).price(20).scans for setting in ((1, 1), (12, 1), (12, 8), (60, 8))]
    assert scans == sorted(scans)
    assert scans[2] == delay_of(limit_of(Budget(12, 8).spacing(20)))


def test_the_price_is_said_in_words() -> None:
    text = "a change of one standard deviation is found after about 19 scans (1.0 days)"
    assert str(Budget(months=12, streams=8).price(20)) == text


def test_a_stream_without_answers_has_no_spacing() -> None:
    with pytest.raises(ValueError, match="found 0"):
        Budget().spacing(0)
