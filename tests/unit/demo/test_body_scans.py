"""The phantom of the demo: slices of an abdomen, drawn from a seed."""

from __future__ import annotations

import numpy as np
import pytest

from locum.demo.body import LESION, LIVER, SHAPE, VOXEL_MM, Field, draw_body
from locum.demo.body_scans import MEMBERS, OUTSIDE, SCANNERS, BodyScan, scan_body


@pytest.fixture(scope="module")
def drawn() -> tuple[Field, np.ndarray]:
    return draw_body(np.random.default_rng(5))


def test_a_scan_is_the_same_for_the_same_hospital_patient_and_seed() -> None:
    first, again = (BodyScan.at(OUTSIDE, 2) for _ in range(2))

    np.testing.assert_array_equal(first.voxels, again.voxels)
    np.testing.assert_array_equal(first.mask, again.mask)


def test_another_seed_draws_another_patient(drawn: tuple[Field, np.ndarray]) -> None:
    _, mask = draw_body(np.random.default_rng(6))

    assert (mask != drawn[1]).mean() > 0.01


def test_scan_and_mask_have_the_grid_of_the_hospital(drawn: tuple[Field, np.ndarray]) -> None:
    scan = BodyScan("aster", scan_body(drawn[0], SCANNERS["aster"], np.random.default_rng(0)), drawn[1])

    for image in (scan.volume, scan.true_mask):
        assert image.shape == SHAPE
        assert image.header.get_zooms() == pytest.approx(VOXEL_MM)
        # The patient is in the middle of the field.
        np.testing.assert_allclose(image.affine @ [*(np.array(SHAPE) - 1) / 2, 1], [0, 0, 0, 1], atol=1e-4)


def test_mask_has_a_liver_at_the_right_with_a_lesion_inside(drawn: tuple[Field, np.ndarray]) -> None:
    _, mask = drawn

    liver_ml, lesion_ml = ((mask == label).sum() * np.prod(VOXEL_MM) / 1000 for label in (LIVER, LESION))
    assert 150 < liver_ml < 1500
    assert 2 < lesion_ml < 60
    assert np.argwhere(mask == LIVER)[:, 0].mean() > SHAPE[0] / 2
    # Around the lesion is liver.
    beside = np.roll(mask == LESION, 1, axis=0) & (mask != LESION)
    assert (mask[beside] == LIVER).mean() > 0.7


def test_edges_are_shares_of_two_tissues(drawn: tuple[Field, np.ndarray]) -> None:
    bright, _ = drawn

    # Skin is 0.46 and air 0.02: only an average is between, and half of the skin's outer voxels are.
    assert ((bright > 0.08) & (bright < 0.18)).sum() > 300


@pytest.mark.parametrize("hospital", SCANNERS)
def test_only_the_hospital_from_outside_shows_bright_tissue_dark(
    hospital: str, drawn: tuple[Field, np.ndarray]
) -> None:
    bright, _ = drawn
    voxels = scan_body(bright, SCANNERS[hospital], np.random.default_rng(0))

    sign = np.corrcoef(bright.ravel(), voxels.ravel())[0, 1]
    assert sign < -0.7 if hospital not in MEMBERS else sign > 0.8


def test_dice_counts_the_lesion_as_a_part_of_the_liver(drawn: tuple[Field, np.ndarray]) -> None:
    scan = BodyScan("aster", np.zeros(SHAPE, np.int16), drawn[1])

    assert scan.dice_of(drawn[1]) == {"liver": 1, "lesion": 1}
    assert scan.dice_of(np.where(drawn[1] == LESION, LIVER, drawn[1])) == {"liver": 1, "lesion": 0}
    assert scan.dice_of(np.zeros(SHAPE, np.uint8)) == {"liver": 0, "lesion": 0}
