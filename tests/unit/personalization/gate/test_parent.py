"""Masks where the parent fails: they are measured by the members' targets too."""

from __future__ import annotations

import numpy as np
import pytest

from personalization.gate import Targets
from personalization.gate.masks import Maps
from personalization.gate.parent import BesideParent, fragments, oversized_rate, size_factor


def values_of(candidate: Maps, before: Maps, targets: Targets) -> list[float | None]:
    observed = BesideParent(candidate, before, range(len(candidate)), 2, targets)
    return [check.measure(observed) for check in (size_factor, oversized_rate, fragments)]


def test_a_target_that_the_parent_misses_is_measured_by_the_members_targets() -> None:
    """The candidate finds 8 squares on 16 % of the pixels, as members have them, and the parent one pixel."""
    candidate, before = np.zeros((4, 40, 40), np.uint8), np.zeros((4, 40, 40), np.uint8)
    candidate[:, 4:36:8, 4:14] = candidate[:, 5:37:8, 4:14] = 1
    candidate[:, 4:36:8, 24:34] = candidate[:, 5:37:8, 24:34] = 1
    before[:, 0, 0] = 1
    share = float(candidate.mean())
    alone = values_of(candidate, before, Targets())
    known = values_of(candidate, before, Targets(share, share, 8.0))
    assert alone == pytest.approx([(share + 1e-4) / (1 / 1600 + 1e-4), 1.0, 4.5])
    assert known == pytest.approx([1.0, 0.0, 1.0])
    # Three times what members have is an explosion by either.
    third = values_of(candidate, before, Targets(share / 3, share / 3, 1.0))
    assert third == pytest.approx([(share + 1e-4) / (share / 3 + 1e-4), 1.0, 4.5])


def test_of_several_classes_each_is_compared_with_the_parent_alone() -> None:
    candidate, before = np.zeros((1, 40, 40), np.uint8), np.zeros((1, 40, 40), np.uint8)
    candidate[0, :8] = 1
    before[0, :8] = 2
    observed = BesideParent(candidate, before, [0], 3, Targets(0.2, 0.2, 1.0))
    assert size_factor.measure(observed) == pytest.approx(0.2001 / 0.0001)
