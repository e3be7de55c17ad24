"""Uncertainty, on cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from service.inference.uncertainty import Uncertainty


def uncertainty_of(*pixels: tuple[float, ...]) -> float:
    """Uncertainty of a picture one pixel high, from class probabilities pixel by pixel."""
    found = Uncertainty()
    found.add(np.array(pixels, np.float32).T[None, :, None, :])
    return found.value


def test_uncertainty_is_0_for_certain_and_1_for_even_pixels() -> None:
    assert uncertainty_of((0, 1), (1, 0)) == pytest.approx(0, abs=1e-4)
    assert uncertainty_of((0.25, 0.25, 0.25, 0.25)) == pytest.approx(1)
    assert uncertainty_of((1 / 3, 1 / 3, 1 / 3)) == pytest.approx(1)


def test_uncertainty_of_two_pixels_matches_the_hand_computed_value() -> None:
    h = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2)) / math.log(2)
    g = -(0.4 * math.log(0.4) + 0.6 * math.log(0.6)) / math.log(2)
    assert uncertainty_of((0.8, 0.2), (0.4, 0.6)) == pytest.approx((0.2 * h + 0.6 * g) / 0.8, rel=1e-5)


def test_uncertainty_is_not_diluted_by_certain_background() -> None:
    alone = uncertainty_of((0.3, 0.7))
    assert uncertainty_of((0.3, 0.7), *[(1.0, 0.0)] * 1000) == pytest.approx(alone, rel=1e-3)


def test_uncertainty_of_an_empty_mask_follows_its_pixels() -> None:
    assert uncertainty_of(*[(0.9999, 0.0001)] * 4) < 0.01
    assert uncertainty_of(*[(0.6, 0.4)] * 4) > 0.9


def test_uncertainty_of_batches_equals_that_of_the_whole() -> None:
    p = np.random.default_rng(0).dirichlet((1, 1, 1), (5, 4, 4)).astype(np.float32).transpose(0, 3, 1, 2)
    whole, parts = Uncertainty(), Uncertainty()
    whole.add(p)
    for batch in (p[:2], p[2:]):
        parts.add(batch)
    assert parts.value == pytest.approx(whole.value, rel=1e-12)
    assert Uncertainty().value == 0.0
