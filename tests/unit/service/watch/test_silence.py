"""Silence: against the integral over the Gamma's rates, and by simulated days."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import gamma

from service.watch import Arrivals, Budget
from service.watch.silence import FORGETS


def after_weeks(weeks: int, per_day: int, weekend: int = 0) -> Arrivals:
    arrivals = Arrivals()
    for day in range(7 * weeks):
        arrivals = arrivals.after(day % 7, per_day if day % 7 < 5 else weekend)
    return arrivals


def test_probability_is_the_mean_over_the_rates_that_the_days_allow() -> None:
    arrivals = Arrivals()
    for scans in (3, 5, 4):
        arrivals = arrivals.after(0, scans)
    total = FORGETS**2 * 3 + FORGETS * 5 + 4
    days = FORGETS**2 + FORGETS + 1
    rates = gamma(total + 0.5, scale=1 / days)
    expected = quad(lambda rate: np.exp(-rate) * rates.pdf(rate), 0, 60)[0]
    assert arrivals.after(0, 0).probability == pytest.approx(expected, rel=1e-6)
    assert arrivals.usual(0) == pytest.approx(total / days)


def test_days_of_a_silence_multiply_and_a_scan_ends_it() -> None:
    arrivals = after_weeks(8, 4, weekend=2)
    monday, tuesday = (arrivals.after(day, 0).probability for day in (0, 1))
    both = arrivals.after(0, 0).after(1, 0)
    assert both.probability == pytest.approx(monday * tuesday)
    assert both.after(2, 1).probability == 1
    # The two silent days are known from then on.
    assert both.after(2, 1).usual(0) < arrivals.usual(0)
    assert both.answered().after(2, 1).usual(0) == arrivals.usual(0)


@pytest.mark.parametrize("weeks", [2, 3, 10, 100])
def test_ten_scans_a_day_are_missed_after_one_day(weeks: int) -> None:
    arrivals = after_weeks(weeks, 10)
    assert arrivals.after(0, 0).probability < Budget(months=12, streams=6).daily * (1.2 if weeks == 2 else 1)


def test_a_quiet_weekend_is_no_silence() -> None:
    arrivals = after_weeks(4, 200)
    assert arrivals.probability > 0.1
    assert arrivals.after(0, 0).probability < 1e-9


def test_a_weekday_that_was_never_seen_does_not_count() -> None:
    arrivals = Arrivals()
    for day in range(5):
        arrivals = arrivals.after(day, 50)
    assert arrivals.after(5, 0).after(6, 0).probability == 1
    assert arrivals.usual(5) == 0


def test_the_usual_number_follows_a_hospital_that_grows() -> None:
    arrivals = after_weeks(50, 5)
    for _ in range(100):
        arrivals = arrivals.after(0, 20)
    assert 19 < arrivals.usual(0) <= 20


def test_false_alarms_are_no_more_frequent_than_was_set() -> None:
    rng, budget, alarms, days = np.random.default_rng(7), Budget(months=1, streams=1), 0, 7 * 600
    arrivals = Arrivals()
    for day in range(days):
        arrivals = arrivals.after(day % 7, int(rng.poisson(1.5)))
        if arrivals.probability < budget.daily:
            alarms += 1
            arrivals = Arrivals()
    assert 0 < alarms <= days * budget.daily


def test_state_survives_json() -> None:
    arrivals = after_weeks(3, 7).after(0, 0)
    assert Arrivals.of(json.loads(json.dumps(asdict(arrivals)))) == arrivals
