"""The mask covers the organ, however the volume is stored.

The network is trained on an asymmetric phantom, which has a darker mirror image of the organ. It segments
one unseen patient in all 48 axis orders and directions, and obliquely. The truth is the phantom's formula.
"""

from __future__ import annotations

import gzip
import itertools
from importlib import import_module
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from training.phantom import SCANNERS, Anatomy, make_volume, true_centroid, true_volume_ml

PATIENT = 2024
SHAPE = (48, 48, 14)

Matrix = NDArray[np.float64]


@pytest.fixture(scope="module")
def api(start: Any, organ_store: Path) -> Any:
    return start(organ_store)


def affine_of(rotation: Matrix, spacing: tuple[float, float, float], shape: tuple[int, ...]) -> Matrix:
    """Axes along `rotation`'s columns; the middle of the grid is the world's origin."""
    affine = np.eye(4)
    affine[:3, :3] = rotation * spacing
    affine[:3, 3] = -affine[:3, :3] @ ((np.array(shape) - 1) / 2)
    return affine


def turned(degrees: float, axis: tuple[float, float, float]) -> Matrix:
    """The rotation about an axis."""
    unit = np.array(axis) / np.linalg.norm(axis)
    return np.asarray(Rotation.from_rotvec(unit * degrees, degrees=True).as_matrix())


def stored_as(affine: Matrix, shape: tuple[int, ...], order: tuple[int, ...], flips: tuple[int, ...]) -> Any:
    """(affine, shape, reorder) of the same grid with its axes permuted and some reversed."""
    change = np.zeros((4, 4))
    change[3, 3] = 1
    for new, old in enumerate(order):
        change[old, new] = -1 if flips[new] else 1
        change[old, 3] = shape[old] - 1 if flips[new] else 0

    def reorder(volume: NDArray[Any]) -> NDArray[Any]:
        moved = volume.transpose(order)
        return moved[tuple(slice(None, None, -1 if flip else None) for flip in flips)]

    return affine @ change, tuple(shape[axis] for axis in order), reorder


def segment(api: Any, voxels: NDArray[Any], affine: Matrix) -> NDArray[Any]:
    """The mask, checked to be on the scan's own grid and affine."""
    response = api.segment(nib.Nifti1Image(np.ascontiguousarray(voxels), affine).to_bytes())
    assert response.status_code == 200, response.text
    answer = nib.Nifti1Image.from_bytes(gzip.decompress(response.content))
    assert answer.shape == voxels.shape
    np.testing.assert_allclose(answer.affine, affine, atol=1e-4)
    return np.asarray(answer.dataobj)


def world_of(affine: Matrix, shape: tuple[int, ...]) -> Matrix:
    indices = np.stack(np.meshgrid(*(np.arange(side) for side in shape), indexing="ij"), axis=-1)
    return np.asarray(indices @ affine[:3, :3].T + affine[:3, 3])


def assert_true(mask: NDArray[Any], affine: Matrix, least_dice: float = 0.88) -> None:
    """The mask is the patient's organ: where it is, how large it is and of its shape."""
    world = world_of(affine, mask.shape)
    truth = Anatomy.of(PATIENT).mask(world)
    dice = 2 * np.count_nonzero(mask & truth) / (np.count_nonzero(mask) + np.count_nonzero(truth))
    assert dice > least_dice
    centroid = world[mask == 1].mean(axis=0)
    assert np.linalg.norm(centroid - true_centroid(PATIENT)) < 2.0
    volume = np.count_nonzero(mask) * abs(np.linalg.det(affine[:3, :3])) / 1000
    assert volume == pytest.approx(true_volume_ml(PATIENT), rel=0.15)


def test_all_48_stored_orientations_give_the_same_correct_mask(api: Any) -> None:
    affine = affine_of(np.eye(3), (2.0, 2.0, 3.4), SHAPE)
    voxels, _ = make_volume(SCANNERS["aster"], PATIENT, affine, SHAPE)
    plain = segment(api, voxels, affine)
    assert_true(plain, affine)
    ways = list(itertools.product(itertools.permutations(range(3)), itertools.product((0, 1), repeat=3)))
    assert len(ways) == 48
    for order, flips in ways:
        stored_affine, _, reorder = stored_as(affine, SHAPE, order, flips)
        mask = segment(api, reorder(voxels), stored_affine)
        assert_true(mask, stored_affine)
        np.testing.assert_array_equal(mask, reorder(plain), err_msg=f"{order} {flips}")


@pytest.mark.parametrize(
    ("degrees", "axis"),
    [(8, (1, 0, 0)), (20, (1, 0, 0)), (30, (0, 1, 0)), (40, (0, 0, 1)), (35, (1, -1, 1)), (50, (1, 2, 3))],
)
def test_oblique_volume_gives_the_correct_mask(
    api: Any, degrees: float, axis: tuple[float, float, float]
) -> None:
    shape = (48, 48, 28)
    affine = affine_of(turned(degrees, axis), (2.1, 2.1, 2.6), shape)
    if degrees % 20 == 0:
        affine, shape, _ = stored_as(affine, shape, (2, 0, 1), (1, 0, 1))
    voxels, _ = make_volume(SCANNERS["aster"], PATIENT, affine, shape)
    assert_true(segment(api, voxels, affine), affine, least_dice=0.85)


def test_oblique_volume_too_large_to_restore_is_413(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("model_store.preprocessing.restore"), "MOST_ELEMENTS", 10_000)
    for degrees, status in ((8, 200), (20, 413)):
        affine = affine_of(turned(degrees, (1, 0, 0)), (2.0, 2.0, 3.4), SHAPE)
        voxels, _ = make_volume(SCANNERS["aster"], PATIENT, affine, SHAPE)
        answer = api.segment(nib.Nifti1Image(voxels, affine).to_bytes())
        assert answer.status_code == status, answer.text
    assert "the volume is tilted by 20 degrees" in answer.json()["detail"]


def test_another_resolution_gives_the_correct_mask(api: Any) -> None:
    shape = (80, 64, 24)
    affine = affine_of(np.eye(3), (1.2, 1.5, 2.0), shape)
    voxels, _ = make_volume(SCANNERS["birch"], PATIENT, affine, shape)
    assert_true(segment(api, voxels, affine), affine)


def test_mirrored_mask_fails_the_truth_check() -> None:
    affine = affine_of(np.eye(3), (2.0, 2.0, 3.4), SHAPE)
    _, truth = make_volume(SCANNERS["aster"], PATIENT, affine, SHAPE)
    assert_true(truth, affine, least_dice=0.99)
    for axis in range(3):
        with pytest.raises(AssertionError):
            assert_true(np.flip(truth, axis), affine)
