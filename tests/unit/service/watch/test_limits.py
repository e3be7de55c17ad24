"""Limits and delays: against published tables, an approximation in closed form and simulation."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest

from service.watch.limits import K, delay_of, limit_of, share_limit_of, spacing_of


@pytest.mark.parametrize(
    ("limit", "shift", "published"),
    # Montgomery, Introduction to Statistical Quality Control, table 9.3
    [
        *(
            (4, shift, arl)
            for shift, arl in zip((0, 0.5, 1, 2, 3), (168, 26.6, 8.38, 3.34, 2.19), strict=True)
        ),
        *(
            (5, shift, arl)
            for shift, arl in zip((0, 0.5, 1, 2, 3), (465, 38.0, 10.4, 4.01, 2.57), strict=True)
        ),
    ],
)
def test_spacing_is_that_of_the_textbook(limit: float, shift: float, published: float) -> None:
    assert spacing_of(limit, shift) == pytest.approx(published, rel=0.003)


@pytest.mark.parametrize("limit", [3.0, 6.0, 9.0, 12.0])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_spacing_is_near_siegmunds_approximation(limit: float, shift: float) -> None:
    """Siegmund (1985): (exp(2 D b) - 2 D b - 1) / (2 D^2), D = k - shift and b = h + 1.166, on each side."""

    def one_side(drift: float) -> float:
        b = limit + 1.166
        return (exp(2 * drift * b) - 2 * drift * b - 1) / (2 * drift**2)

    expected = 1 / (1 / one_side(K - shift) + 1 / one_side(K + shift))
    assert spacing_of(limit, shift) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("spacing", [10.0, 168.0, 465.0, 36_500.0, 7_300_000.0])
def test_a_limit_has_the_spacing_that_was_asked_for(spacing: float) -> None:
    assert spacing_of(limit_of(spacing)) == pytest.approx(spacing, rel=1e-4)


def test_a_spacing_below_ten_values_is_rejected() -> None:
    for limit in (lambda: limit_of(9.0), lambda: share_limit_of(0.1, 9.0)):
        with pytest.raises(ValueError, match="at least 10 values"):
            limit()


@pytest.mark.parametrize(("limit", "shift"), [(4.0, 1.0), (4.0, 2.0), (8.0, 1.0)])
def test_delay_is_that_of_sums_that_had_run_for_long(limit: float, shift: float) -> None:
    rng = np.random.default_rng(5)
    sums = np.zeros(20_000)
    for _ in range(60):
        sums = np.maximum(0, sums + rng.normal(size=len(sums)) - K)
        sums[sums >= limit] = 0
    delays, taken = np.zeros(len(sums)), 0
    while not delays.all():
        taken += 1
        sums = np.maximum(0, sums + shift + rng.normal(size=len(sums)) - K)
        delays[(sums >= limit) & (delays == 0)] = taken
    assert delay_of(limit, shift) == pytest.approx(delays.mean(), rel=0.02)
    assert delay_of(limit, shift) < spacing_of(limit, shift)


@pytest.mark.parametrize(("share", "spacing"), [(0.005, 2000.0), (0.02, 500.0), (0.3, 300.0), (0.9, 100.0)])
def test_a_share_has_the_spacing_that_was_asked_for(share: float, spacing: float) -> None:
    found = share_limit_of(share, spacing)
    rng = np.random.default_rng(6)
    sums, lengths, taken = np.zeros(3000), np.zeros(3000), 0
    while not lengths.all():
        taken += 1
        sums = np.maximum(0, sums + (rng.random(len(sums)) < share) - found.slack)
        lengths[(sums >= found.limit) & (lengths == 0)] = taken
        if taken % 64 == 0:
            # Those that have alarmed are not needed any more.
            left = lengths == 0
            if left.sum() * 4 < len(sums):
                break
    # The rate of alarms over all that was seen, which needs no run to its end.
    ended = lengths > 0
    seen = lengths[ended].sum() + (~ended).sum() * taken
    assert spacing * 0.9 < seen / ended.sum() < spacing * 2


def test_a_share_limit_in_closed_form() -> None:
    """Slack 1/2 and limit 1: an answer that has it adds half, another takes half. L = (1 + p) / p^2."""
    share = 1 / 3
    assert share_limit_of(share, (1 + share) / share**2 - 1e-9).limit == pytest.approx(0.75)
    assert share_limit_of(share, (1 + share) / share**2 - 1e-9).slack == 0.5


def test_a_share_that_is_none_is_rejected() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        share_limit_of(0.0, 100.0)
