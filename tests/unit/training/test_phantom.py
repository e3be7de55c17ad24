from __future__ import annotations

import hashlib
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from model_store.task import Task
from training.phantom import (
    SCANNERS,
    Anatomy,
    make_volume,
    patient_seed,
    true_centroid,
    true_volume_ml,
    write_federation,
)


def digest(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def oblique(voxel_mm: float, degrees: float, side: int) -> tuple[np.ndarray, tuple[int, int, int]]:
    """A cube of `side` voxels around the origin, rotated about the axis (1, 1, 1)."""
    angle = np.deg2rad(degrees)
    axis = np.ones(3) / np.sqrt(3)
    cross = np.array([[0, -axis[2], axis[1]], [axis[2], 0, -axis[0]], [-axis[1], axis[0], 0]])
    turn = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
    affine = np.eye(4)
    affine[:3, :3] = turn * voxel_mm
    affine[:3, 3] = -affine[:3, :3] @ np.full(3, (side - 1) / 2)
    return affine, (side, side, side)


def test_write_federation_is_deterministic_by_seed(tmp_path: Path) -> None:
    first = digest(write_federation(tmp_path / "a", ["aster", "dune"], 2, seed=4))
    assert digest(write_federation(tmp_path / "b", ["aster", "dune"], 2, seed=4)) == first
    other = digest(write_federation(tmp_path / "c", ["aster", "dune"], 2, seed=5))
    assert len(first) == 1 + 2 * (2 + 2 + 1)
    assert all(other[name] != first[name] for name in first if name.endswith(".nii.gz"))


def test_patient_files_do_not_depend_on_other_sites_and_patients(tmp_path: Path) -> None:
    small = write_federation(tmp_path / "small", ["birch"], 1)
    large = write_federation(tmp_path / "large", ["aster", "birch"], 3)
    name = "birch/images/birch-01.nii.gz"
    assert (small / name).read_bytes() == (large / name).read_bytes()


@pytest.mark.parametrize("scanner", SCANNERS.values(), ids=lambda s: s.name)
def test_written_files_have_the_scanner_axes_and_true_position(scanner, tmp_path: Path) -> None:
    root = write_federation(tmp_path, [scanner.name], 1, seed=2)
    image = nib.load(root / scanner.name / "images" / f"{scanner.name}-01.nii.gz")
    mask = nib.load(root / scanner.name / "masks" / f"{scanner.name}-01.nii.gz")
    assert "".join(nib.aff2axcodes(image.affine)) == scanner.axes
    np.testing.assert_allclose(image.affine, mask.affine)
    np.testing.assert_allclose(image.get_qform(), image.get_sform(), atol=1e-4)
    seed = patient_seed(2, scanner.name, 0)
    voxels = np.argwhere(mask.get_fdata() == 1)
    centroid = nib.affines.apply_affine(mask.affine, voxels).mean(axis=0)
    np.testing.assert_allclose(centroid, true_centroid(seed), atol=0.5)
    millilitres = len(voxels) * abs(np.linalg.det(mask.affine[:3, :3])) / 1000
    assert millilitres == pytest.approx(true_volume_ml(seed), rel=0.05)
    assert Task.load(root / "task.yaml").labels == {"organ": (1,)}


def test_make_volume_on_an_oblique_grid_keeps_position_and_volume() -> None:
    affine, shape = oblique(2.0, 25.0, 44)
    voxels, mask = make_volume(SCANNERS["aster"], 11, affine, shape)
    assert voxels.dtype == np.int16
    assert mask.dtype == np.uint8
    centroid = nib.affines.apply_affine(affine, np.argwhere(mask)).mean(axis=0)
    np.testing.assert_allclose(centroid, true_centroid(11), atol=0.3)
    assert mask.sum() * 8 / 1000 == pytest.approx(true_volume_ml(11), rel=0.03)


def test_make_volume_depends_on_world_points_apart_from_noise() -> None:
    scanner = SCANNERS["cedar"]
    affine, shape = scanner.grid(48)
    voxels, mask = make_volume(scanner, 3, affine, shape)
    # The same grid with its first axis stored backwards.
    backwards = affine @ np.array([[-1, 0, 0, shape[0] - 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    voxels_b, mask_b = make_volume(scanner, 3, backwards, shape)
    assert np.array_equal(mask_b[::-1], mask)
    difference = (voxels_b[::-1] - voxels.astype(float)) / scanner.gain
    # The difference is only two independent draws of the noise.
    assert difference.std() == pytest.approx(scanner.noise * np.sqrt(2), rel=0.05)
    assert abs(difference.mean()) < 0.002


def test_organ_differs_from_its_mirror_images() -> None:
    """Even with aligned centroids, a mirrored or rotated organ overlaps the true one poorly."""
    grid = np.stack(np.meshgrid(*[np.arange(-24.0, 24.0, 1.0)] * 3, indexing="ij"), axis=-1)
    for seed in range(3):
        anatomy = Anatomy.of(seed)
        centre = np.array(true_centroid(seed))
        organ = anatomy.mask(grid + centre)
        for signs in [(-1, 1, 1), (1, -1, 1), (1, 1, -1), (-1, -1, 1), (-1, 1, -1), (1, -1, -1)]:
            mirrored = anatomy.mask(grid * signs + centre)
            dice = 2 * (organ & mirrored).sum() / (organ.sum() + mirrored.sum())
            assert dice < 0.9, (seed, signs)
        decoy = anatomy.mask((grid + centre) * (-1, 1, 1))
        assert (organ & decoy).sum() == 0


@pytest.mark.parametrize("scanner", SCANNERS.values(), ids=lambda s: s.name)
def test_organ_is_brighter_and_decoy_darker_than_the_surroundings(scanner) -> None:
    affine, shape = scanner.grid(48)
    voxels, _ = make_volume(scanner, 7, affine, shape)
    indices = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)
    world = nib.affines.apply_affine(affine, indices)
    anatomy = Anatomy.of(7)
    atlas = anatomy.to_atlas(world)
    organ, decoy = anatomy.organ(atlas) < -2, anatomy.decoy(atlas) < -2
    around = (anatomy.body(atlas) < -8) & (np.minimum(anatomy.organ(atlas), anatomy.decoy(atlas)) > 3)
    around &= anatomy.spine(atlas) > 3
    medians = [float(np.median(voxels[where])) for where in (decoy, around, organ)]
    assert medians[0] < medians[1] < medians[2]


def test_patients_differ_in_size_and_place() -> None:
    seeds = [patient_seed(0, "aster", i) for i in range(6)]
    volumes = [true_volume_ml(s) for s in seeds]
    assert max(volumes) / min(volumes) > 1.1
    assert np.ptp([true_centroid(s)[0] for s in seeds]) > 2
