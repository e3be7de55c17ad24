"""Paired comparisons of Dice per patient."""

from __future__ import annotations

import math

import pytest

from benchmarks.accuracy.unseen.hospital import _arms
from benchmarks.harness.scores import difference, difference_by_seed

# The first patient has a target; the others have none, and a network invents one in the second.
FOUND = {"p": 0.8, "q": math.nan, "r": math.nan}
INVENTED = {"p": 0.82, "q": 0.0, "r": math.nan}


def test_difference_counts_an_invented_target_as_a_loss() -> None:
    before, after = (
        {0: {("site", patient): dice for patient, dice in of.items()}} for of in (FOUND, INVENTED)
    )
    found = difference(after, before, ["site"])
    assert found is not None
    # (0.02 - 1) / 2: the third patient has nothing to compare.
    assert (found.mean, found.count) == (pytest.approx(-0.49), 2)
    assert difference_by_seed(after, before) == pytest.approx([-0.49])
    back = difference(before, after, ["site"])
    assert back is not None
    assert back.mean == pytest.approx(0.49)


def test_a_patient_that_one_arm_did_not_see_is_left_out() -> None:
    before, after = {0: {("s", "p"): 0.5, ("s", "q"): 0.5}}, {0: {("s", "p"): 0.6}}
    assert difference_by_seed(after, before) == pytest.approx([0.1])
    assert difference_by_seed(before, after) == pytest.approx([-0.1])


def test_unseen_counts_an_invented_target_as_harm() -> None:
    mean, _, harmed = _arms(FOUND, {"auto": INVENTED})["auto"]
    assert (mean, harmed) == (pytest.approx(-0.49), 0.5)
