"""Masks through a lens, beside a parent that sees nothing, or inverted scans."""

from __future__ import annotations

import math

import numpy as np
import pytest

from personalization.gate import ObservedLens, Shifted, Targets, ThroughLens
from personalization.gate.lens import lens_giant, lens_pieces, lens_size
from personalization.gate.masks import Maps
from personalization.gate.parent import EPS, fragments, oversized_rate, size_factor

SHARE, NOTHING = 0.1, np.zeros((4, 40, 40), np.uint8)


def masks(rows: int) -> Maps:
    found = NOTHING.copy()
    found[:, 4 : 4 + rows, :32] = 1
    return found


def observed(
    candidate: Maps, parent: Maps, targets: Targets, natural: float = 0.0, *, negated: bool = False
) -> ObservedLens:
    lens, shifted = ThroughLens(0.5, negated=negated), Shifted(0.0, 0.5)
    return ObservedLens(candidate, parent, range(4), 2, targets, natural, lens, shifted)


def test_a_parent_that_finds_something_is_the_measure_as_of_a_dose() -> None:
    seen = observed(masks(9), masks(5), Targets(SHARE, 0.2, 1.0))
    for own, other in ((lens_size, size_factor), (lens_giant, oversized_rate), (lens_pieces, fragments)):
        assert own.measure(seen) == other.measure(seen)


@pytest.mark.parametrize("negated", [False, True])
def test_else_the_members_size_is_give_or_take_their_deviation(negated: bool) -> None:
    parent = masks(30) if negated else NOTHING
    now = float(masks(15).mean())
    factor = (now + EPS) / (SHARE + EPS)
    seen = observed(masks(15), parent, Targets(SHARE, 0.4, 1.0), 0.25, negated=negated)
    assert lens_size.measure(seen) == pytest.approx(factor / math.exp(0.25))
    # A third of the members' size is as far away as three times of it.
    small = observed(masks(1), parent, Targets(SHARE, 0.4, 1.0), negated=negated)
    assert lens_size.measure(small) == pytest.approx((SHARE + EPS) / (float(masks(1).mean()) + EPS))


def test_twice_as_many_pieces_are_allowed_beside_a_parent_that_finds_nothing() -> None:
    pieces = NOTHING.copy()
    pieces[:, ::8, ::8] = 1
    seen = observed(pieces, NOTHING, Targets(SHARE, 0.2, 11.0))
    assert lens_pieces.measure(seen) == pytest.approx((25 + 1) / (11 + 1) / 2)
    assert fragments.measure(seen) == pytest.approx((25 + 1) / (11 + 1))


def test_nothing_is_measured_where_neither_the_parent_nor_the_members_are_a_measure() -> None:
    for seen in (
        observed(masks(9), NOTHING, Targets()),
        observed(masks(9), masks(30), Targets(), negated=True),
    ):
        assert [check.measure(seen) for check in (lens_size, lens_giant, lens_pieces)] == [None] * 3
