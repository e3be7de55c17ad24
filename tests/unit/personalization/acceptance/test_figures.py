"""Measures of an answer beside its mask, and the figures of a label over patients, computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from personalization.acceptance import Measure, figures_of, measure, merged

IGNORED = 255
ONE = Measure(10, 8, 6, 1.0, 0.8, 0.9, 2.0)


def test_measure_counts_what_is_known_of_every_label() -> None:
    found, drawn = np.zeros((2, 6, 6), np.uint8)
    found[1:4, 1:4] = 1
    drawn[1:4, 2:5] = 1
    drawn[1, 4] = IGNORED
    found[5, 5] = 2
    one, two = measure(
        found, drawn, [(1,), (1, 2)], ignored=IGNORED, spacing=None, voxel_ml=None, tolerance=1.0
    )
    assert (one.found, one.drawn, one.both) == (9, 8, 6)
    assert one.dice == pytest.approx(12 / 17)
    assert (two.found, two.drawn, two.both, two.found_ml) == (10, 8, 6, None)
    assert one.hd95 == pytest.approx(1.0)
    assert one.surface_dice == pytest.approx(1.0)


def test_a_label_that_is_nowhere_has_no_dice_and_one_that_is_missed_no_surface() -> None:
    found, drawn = np.zeros((2, 4, 4, 4), np.uint8)
    drawn[1, 1, 1] = 2
    nowhere, missed = measure(
        found, drawn, [(1,), (2,)], ignored=IGNORED, spacing=(1, 1, 3), voxel_ml=0.003, tolerance=1.0
    )
    assert math.isnan(nowhere.dice)
    assert (missed.dice, missed.drawn_ml, missed.found_ml) == (0.0, 0.003, 0.0)
    assert math.isnan(missed.hd95)
    assert math.isnan(missed.surface_dice)


def test_scans_of_a_patient_are_one_volume() -> None:
    both = merged([ONE, Measure(0, 4, 0, 0.0, 0.4, math.nan, math.nan)])
    assert (both.found, both.drawn, both.both) == (10, 12, 6)
    assert both.dice == pytest.approx(12 / 22)
    assert (both.found_ml, both.drawn_ml) == pytest.approx((1.0, 1.2))
    assert (both.surface_dice, both.hd95) == (0.9, 2.0)


def test_figures_are_over_patients_who_have_the_label() -> None:
    missed = Measure(0, 4, 0, 0.0, 0.4, math.nan, math.nan)
    without = Measure(5, 0, 0, 0.5, 0.0, math.nan, math.nan)
    patients = [*[ONE] * 9, missed, without, replace(without, found=0, found_ml=0.0)]
    found = figures_of(patients)
    assert (found.n, found.without, found.found_elsewhere, found.hd95_n, found.bias_n) == (10, 2, 1, 9, 12)
    assert found.dice == pytest.approx(0.9 * 12 / 18)
    assert found.surface_dice == pytest.approx(0.81)
    assert found.missed == pytest.approx(0.1)
    # 1 - (1 - p)^10 - 10 p (1 - p)^9 = 0.95
    assert found.missed_upper_bound == pytest.approx(0.3942, abs=1e-4)
    assert (found.hd95, found.hd95_upper_bound) == (2.0, None)
    differences = [0.2] * 9 + [-0.4, 0.5, 0.0]
    assert found.bias_ml == pytest.approx(np.mean(differences))
    assert found.limits == pytest.approx(
        (
            np.mean(differences) - 1.96 * np.std(differences, ddof=1),
            np.mean(differences) + 1.96 * np.std(differences, ddof=1),
        )
    )
    assert found.bias_share == pytest.approx((9 * 2 - 4 + 5) / (9 * 8 + 4))


def test_fewer_than_ten_have_no_bound() -> None:
    found = figures_of([ONE] * 9)
    assert (found.dice, found.lower_bound, found.missed_upper_bound) == (pytest.approx(12 / 18), None, None)
    assert figures_of([]).dice is None
