"""Masks that changed places among scans, by what a network finds."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from service.worker.swapped import swapped

Maps = NDArray[np.uint8]
Scan = tuple[str, Maps, Maps]


def organ(seed: int, shape: tuple[int, ...] = (40, 40, 3), wrong: float = 0.0) -> Maps:
    """A disc of class 1 with a core of class 2 where the patient has it; a part of its voxels is `wrong`."""
    draw = np.random.default_rng(seed)
    centre = draw.uniform(13, 27, 2)
    far = np.hypot(*(np.indices(shape)[axis] - centre[axis] for axis in (0, 1)))
    found = (far < 9).astype(np.uint8) + (far < 4)
    return np.where(np.random.default_rng(seed + 99).random(shape) < wrong, 0, found).astype(np.uint8)


def scans(count: int = 8, wrong: float = 0.2) -> list[Scan]:
    return [(f"p{seed}", organ(seed, wrong=wrong), organ(seed)) for seed in range(count)]


def with_masks(found: list[Scan], places: list[int]) -> list[Scan]:
    return [(name, maps, found[place][2]) for (name, maps, _), place in zip(found, places, strict=True)]


@pytest.mark.parametrize("wrong", [0.0, 0.2, 0.5])
def test_masks_in_place_have_not_changed_places(wrong: float) -> None:
    assert swapped(scans(wrong=wrong), 3) == []


@pytest.mark.parametrize(
    "places", [[1, 0, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 0, 1, 2], [0, 1, 2, 3, 5, 6, 4, 7]]
)
def test_masks_that_changed_places_are_named_with_the_scan_that_they_fit(places: list[int]) -> None:
    found = swapped(with_masks(scans(), places), 3)
    expected = {(f"p{place}", f"p{scan}") for scan, place in enumerate(places) if scan != place}
    # The mask beside `mask_of` fits `scan`.
    assert {(each.scan, each.mask_of) for each in found} == expected
    assert all(each.fits > each.own + 0.1 for each in found)


def test_a_scan_in_which_nothing_was_found_or_drawn_and_other_grids_say_nothing() -> None:
    empty = np.zeros((40, 40, 3), np.uint8)
    first, second, *_ = scans()
    assert swapped([(first[0], empty, second[2]), (second[0], empty, first[2])], 3) == []
    assert swapped([(first[0], first[1], empty), (second[0], second[1], empty)], 3) == []
    wide = organ(1, (40, 41, 3))
    assert swapped([(first[0], first[1], second[2]), ("other", wide, wide)], 3) == []


def test_dice_is_that_of_the_classes() -> None:
    one, other = scans(2, 0.0)
    found = swapped([(one[0], one[1], other[2]), (other[0], other[1], one[2])], 3)
    fine = one[2][::2, ::2]
    both = sum(int(((fine == index) & (other[2][::2, ::2] == index)).sum()) for index in (1, 2))
    own = 2 * both / ((fine > 0).sum() + (other[2][::2, ::2] > 0).sum())
    assert [each.fits for each in found] == [1.0, 1.0]
    assert found[0].own == pytest.approx(own)
