"""Paired comparisons of Dice per patient."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.accuracy.outside.hospital import arms_of
from benchmarks.harness.scores import difference_of_sites

# The first patient has a target; the others have none, and a network invents one in the second.
FOUND = {"p": 0.8, "q": math.nan, "r": math.nan}
INVENTED = {"p": 0.82, "q": 0.0, "r": math.nan}


def test_change_counts_an_invented_target_as_harm() -> None:
    mean, _, harmed = arms_of(FOUND, {"auto": INVENTED})["auto"]
    assert (mean, harmed) == (pytest.approx(-0.49), 0.5)


def test_sites_count_alike_whatever_their_patients() -> None:
    first = {0: {("east", str(n)): 0.9 for n in range(90)} | {("west", str(n)): 0.1 for n in range(10)}}
    second = {0: dict.fromkeys(first[0], 0.5)}
    found = difference_of_sites(first, second, ["east", "west"])
    assert found is not None
    assert found.interval.mean == pytest.approx((0.4 - 0.4) / 2)
    assert found.each == pytest.approx((0.0,))
    # Within a site all are alike, and sites are not drawn: nothing is uncertain.
    assert (found.interval.low, found.interval.high) == pytest.approx((0, 0))
    assert (found.fewest, found.interval.count) == (10, 100)


def test_the_interval_of_a_mean_of_sites_is_as_wide_as_statistics_say() -> None:
    draw = np.random.default_rng(0)
    values = {
        site: draw.normal(0.1, spread, count) for site, spread, count in (("e", 0.3, 50), ("w", 0.1, 400))
    }
    first = {0: {(site, str(n)): v for site, own in values.items() for n, v in enumerate(own)}}
    found = difference_of_sites(first, {0: dict.fromkeys(first[0], 0.0)}, ["e", "w"])
    assert found is not None
    assert found.interval.mean == pytest.approx(np.mean([own.mean() for own in values.values()]))
    error = np.sqrt(sum(own.var() / len(own) for own in values.values())) / 2
    assert found.interval.high - found.interval.low == pytest.approx(2 * 1.96 * error, rel=0.05)


def test_a_patient_of_two_seeds_is_one_patient() -> None:
    first = {0: {("e", "a"): 1.0, ("e", "b"): 0.0}, 1: {("e", "a"): 0.5}}
    second = {0: {("e", "a"): 0.0, ("e", "b"): 0.0}, 1: {("e", "a"): 0.0}, 2: {("e", "a"): 1.0}}
    found = difference_of_sites(first, second, ["e"])
    assert found is not None
    assert (found.interval.mean, found.interval.count, found.fewest) == ((0.75 + 0) / 2, 2, 2)
    assert found.each == (0.5, 0.5)
    assert difference_of_sites(first, second, ["e", "elsewhere"]) is None


def test_a_difference_of_sites_counts_an_invented_target_as_a_loss() -> None:
    before, after = (
        {0: {("site", patient): dice for patient, dice in of.items()}} for of in (FOUND, INVENTED)
    )
    found = difference_of_sites(after, before, ["site"])
    assert found is not None
    assert (found.interval.mean, found.interval.count) == (pytest.approx(-0.49), 2)
    assert found.each == pytest.approx((-0.49,))
