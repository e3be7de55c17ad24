"""The kinds of shift against their definitions in the protocol, on pictures that show each by itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.accuracy.dose.kinds import KINDS, shifted
from model_store.scan import Scan


def scan_of(values_HW: NDArray[np.float64]) -> Scan:
    return Scan(values_HW[..., None].astype(np.float32), None, "png")


def changed(kind: str, values_HW: NDArray[np.float64], seed: int = 3) -> NDArray[np.float64]:
    found = np.asarray(shifted(kind, "a", seed)(scan_of(values_HW)).voxels, dtype=np.float64)
    assert found.shape == (*values_HW.shape, 1)
    return found[..., 0]


def ramp(rows: int = 48, columns: int = 64) -> NDArray[np.float64]:
    return np.tile(np.linspace(100, 300, columns), (rows, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_changes_a_picture_and_is_repeatable(kind: str) -> None:
    generator = np.random.default_rng(0)
    values = 100 + 200 * generator.random((48, 64))
    found = changed(kind, values)
    assert np.abs(found - values).max() > 1
    assert np.array_equal(found, changed(kind, values))
    assert np.isfinite(found).all()


def test_curve_is_the_cosine_of_the_scaled_intensities() -> None:
    values = ramp()
    expected = [100 + 200 * (1 - math.cos(1.5 * math.pi * (v - 100) / 200)) / 2 for v in values[0]]
    assert changed("curve", values)[0] == pytest.approx(expected, abs=1e-3)
    assert changed("curve", values)[0].argmax() < 44  # it falls again


def test_vignette_darkens_corners_to_a_fifth_and_leaves_the_centre() -> None:
    values = np.full((41, 61), 300.0)
    values[0, 1] = 100.0
    found = changed("vignette", values)
    assert found[20, 30] == pytest.approx(300)
    assert found[-1, -1] == pytest.approx(100 + 0.2 * 200)


def test_ghosting_is_the_picture_and_a_copy_half_a_picture_away() -> None:
    values = np.zeros((40, 40))
    values[10, 7] = 100.0
    found = changed("ghosting", values)
    # Every second row of k-space halved: 3/4 of the picture and 1/4 of it moved by half of the rows.
    assert found[10, 7] == pytest.approx(75)
    assert found[30, 7] == pytest.approx(25)


def test_defocus_spreads_a_point_evenly_over_a_disk() -> None:
    values = np.zeros((100, 100))
    values[50, 50] = 100.0
    found = changed("defocus", values)
    inside = [(r, c) for r in range(48, 53) for c in range(48, 53) if math.hypot(r - 50, c - 50) <= 2]
    assert len(inside) == 13
    assert [found[place] for place in inside] == pytest.approx([100 / 13] * 13)
    assert found.sum() == pytest.approx(100, rel=1e-3)


def test_local_contrast_shows_a_weak_edge_as_well_as_a_strong_one() -> None:
    values = np.zeros((60, 120))
    values[:, 30:] += 20
    values[:, 90:] += 200
    found = changed("local contrast", values)
    weak, strong = (found[30, at + 1] - found[30, at - 2] for at in (30, 90))
    assert weak > 0.3 * strong  # 20 to 200 before


def test_speckle_is_stronger_where_it_is_bright_and_of_the_size_in_the_protocol() -> None:
    values = np.zeros((200, 200))
    values[:, 100:] = 100.0
    found = changed("speckle", values)
    assert found[:, :100].std() == pytest.approx(0, abs=1e-6)
    assert found[:, 100:].std() == pytest.approx(40, rel=0.03)
    assert not np.array_equal(found, changed("speckle", values, seed=4))


def test_jpeg_of_a_slice_has_blocks_of_eight_pixels() -> None:
    values = 255 * np.random.default_rng(1).random((64, 64))
    values = (values + values[::-1] + values[:, ::-1] + 3 * 127) / 6  # weak noise: it is quantised away
    values[0, :2] = 0, 255
    jumps = np.abs(np.diff(changed("jpeg", values), axis=1))[8:].mean(axis=0)
    across, within = jumps[7::8].mean(), np.delete(jumps, np.arange(7, 63, 8)).mean()
    assert across > 2 * within
