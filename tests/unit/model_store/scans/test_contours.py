"""Contours of a mask give the mask back, to readers that test centres and to readers that round points."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.path import Path
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from model_store.scans.dicom.contours import INSET, count_points, filled, outlines

RNG = np.random.default_rng(5)


def shapes() -> NDArray[np.bool_]:
    """Two holes, an island in one of them, a hole in the island, single pixels, pixels at the edge."""
    y, x = np.mgrid[:40, :36]
    mask = (y - 18) ** 2 + (x - 17) ** 2 < 15**2
    mask &= ~((y - 16) ** 2 + (x - 13) ** 2 < 7**2) & ~((y - 26) ** 2 + (x - 24) ** 2 < 4**2)
    mask |= (y - 16) ** 2 + (x - 13) ** 2 < 4**2
    mask[16, 13] = False
    mask[1, 1] = mask[38, 33] = mask[37, 34] = True
    mask[0, 10:20] = mask[:, 35] = True
    return mask


MASKS = [
    shapes(),
    *(RNG.random(RNG.integers(1, 24, 2)) < RNG.random() for _ in range(150)),
    np.ones((5, 7), bool),
    np.indices((9, 9)).sum(axis=0) % 2 == 0,
]


def drawn(contours: list[NDArray[np.float64]], shape: tuple[int, int]) -> NDArray[np.bool_]:
    mask = np.zeros(shape, bool)
    for contour in contours:
        part = filled(contour, shape)
        rows, columns = part.inside.shape
        window = mask[part.top : part.top + rows, part.left : part.left + columns]
        # Keyholes: what a reader does with several contours of a plane makes no difference.
        assert not (window & part.inside).any()
        assert not part.on.any()
        window |= part.inside
    return mask


@pytest.mark.parametrize("mask", MASKS)
def test_contours_of_a_mask_give_the_mask_back(mask: NDArray[np.bool_]) -> None:
    contours = outlines(mask)
    np.testing.assert_array_equal(drawn(contours, mask.shape), mask)
    assert count_points(mask) <= sum(map(len, contours))


@pytest.mark.parametrize("mask", MASKS[:40])
def test_matplotlib_finds_the_same_pixels_inside(mask: NDArray[np.bool_]) -> None:
    """Its paths are filled where they wind around a point; keyholes and holes wind the other way."""
    rows, columns = np.indices(mask.shape)
    centres = np.column_stack([columns.ravel(), rows.ravel()])
    found = np.zeros(mask.size, bool)
    for contour in outlines(mask):
        found |= Path(contour, closed=False).contains_points(centres)
    np.testing.assert_array_equal(found.reshape(mask.shape), mask)


@pytest.mark.parametrize("mask", MASKS[:40])
def test_points_rounded_to_pixels_are_in_the_mask(mask: NDArray[np.bool_]) -> None:
    """As OpenCV's readers take them: an outline that ran along the edge would round to either side."""
    for contour in outlines(mask):
        columns, rows = np.rint(contour).astype(int).T
        assert mask[rows, columns].all()


def test_area_is_that_of_the_pixels_but_for_the_inset() -> None:
    mask = shapes()
    areas = []
    for contour in outlines(mask):
        (x, y), (x2, y2) = contour.T, np.roll(contour, -1, axis=0).T
        areas.append(abs(float((x * y2 - x2 * y).sum())) / 2)
    assert sum(areas) == pytest.approx(mask.sum(), rel=0.02)
    assert sum(areas) < mask.sum()
    (single,) = outlines(np.ones((1, 1), bool))
    assert np.abs(single).tolist() == [[0.5 - INSET] * 2] * 4


@pytest.mark.parametrize("tolerance", [0.3, 0.7, 1.5])
def test_tolerance_leaves_points_out_and_moves_no_edge_farther(tolerance: float) -> None:
    y, x = np.mgrid[:80, :80]
    mask = ((y - 40) ** 2 + (x - 38) ** 2 < 35**2) & ((y - 36) ** 2 + (x - 30) ** 2 > 9**2)
    spacing = (0.8, 0.5)
    whole, thinned = outlines(mask)[0], outlines(mask, tolerance, spacing)[0]
    assert 10 < len(thinned) <= len(whole)
    assert (len(thinned) < 0.7 * len(whole)) == (tolerance >= 0.7)
    start, along = thinned * spacing, (np.roll(thinned, -1, axis=0) - thinned) * spacing
    lengths = np.maximum((along**2).sum(axis=1), 1e-12)
    for point in whole * spacing:
        share = np.clip(((point - start) * along).sum(axis=1) / lengths, 0, 1)
        assert np.linalg.norm(point - start - share[:, None] * along, axis=1).min() <= tolerance + 1e-9
    found = drawn([thinned], mask.shape)
    assert 2 * (found & mask).sum() / (found.sum() + mask.sum()) > 0.95


@pytest.mark.parametrize("tolerance", [0.6, 1.3, 4.0])
def test_thinned_contours_of_a_plane_share_no_pixel(tolerance: float) -> None:
    """Readers combine contours by XOR, and our own refuses those that overlap."""
    thinned = 0
    for _ in range(40):
        mask = gaussian_filter(RNG.standard_normal((30, 34)), 1.2) > 0.05
        contours, covered = outlines(mask, tolerance), np.zeros(mask.shape, int)
        for part in (filled(contour, mask.shape) for contour in contours):
            rows, columns = part.inside.shape
            window = covered[part.top : part.top + rows, part.left : part.left + columns]
            window += part.inside | part.on
        assert covered.max() <= 1
        thinned += sum(map(len, contours)) < 0.9 * sum(map(len, outlines(mask)))
    assert thinned > 20


def test_single_pixels_are_left_by_any_tolerance() -> None:
    mask = np.zeros((9, 9), bool)
    mask[2, 2] = mask[5, 5] = mask[5, 6] = True
    np.testing.assert_array_equal(drawn(outlines(mask, 50.0), mask.shape), mask)


def test_contour_through_the_centres_has_the_pixels_on_it() -> None:
    """As programs write it that outline the centres of the outermost pixels, to two decimals."""
    square = np.array([[2, 2], [6.01, 2], [6, 5.99], [2, 6]], float)
    part = filled(square, (9, 9))
    whole = np.zeros((9, 9), bool)
    whole[part.top : part.top + 5, part.left : part.left + 5] = part.inside | part.on
    expected = np.zeros((9, 9), bool)
    expected[2:7, 2:7] = True
    np.testing.assert_array_equal(whole, expected)
    triangle = filled(np.array([[1, 1], [5, 5], [1, 5]], float), (9, 9))
    np.testing.assert_array_equal(triangle.inside | triangle.on, np.tri(5, dtype=bool))


def test_contour_beyond_the_image_is_cut_at_its_edge() -> None:
    part: Any = filled(np.array([[-3.2, -3.2], [20.3, -3.2], [20.3, 20.3], [-3.2, 20.3]]), (6, 5))
    assert (part.top, part.left, part.inside.shape) == (0, 0, (6, 5))
    assert part.inside.all()
