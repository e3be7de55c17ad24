"""NRRD masks, read by SimpleITK in every orientation."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK as sitk
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from model_store.scan import encode_nifti, encode_nrrd

LABELS = np.random.default_rng(1).integers(0, 4, (5, 7, 3)).astype(np.uint8)
SIGNED_AXES = [
    (order, signs)
    for order in itertools.permutations(range(3))
    for signs in itertools.product((1, -1), repeat=3)
]


def affine_of(order: tuple[int, ...], signs: tuple[int, ...], turn: float = 0.0) -> NDArray[np.float64]:
    affine = np.eye(4)
    axes = np.eye(3)[:, order] * signs
    affine[:3, :3] = Rotation.from_rotvec([turn, turn / 2, -turn]).as_matrix() @ axes * (0.8, 0.7, 2.5)
    affine[:3, 3] = (-31.25, 12.5, 40.0)
    return affine


def read(content: bytes, path: Path) -> Any:
    path.write_bytes(content)
    return sitk.ReadImage(str(path))


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("turn", [0.0, 0.3])
def test_nrrd_lies_where_the_nifti_does_voxel_for_voxel(compress: bool, turn: float, tmp_path: Path) -> None:
    for order, signs in SIGNED_AXES:
        affine = affine_of(order, signs, turn)
        found = read(encode_nrrd(LABELS, affine, compress=compress), tmp_path / "mask.nrrd")
        assert found.GetPixelID() == sitk.sitkUInt8
        np.testing.assert_array_equal(sitk.GetArrayFromImage(found).transpose(2, 1, 0), LABELS)
        for index in [(0, 0, 0), (4, 0, 0), (0, 6, 0), (0, 0, 2), (4, 6, 2)]:
            ras = (affine @ (*index, 1))[:3]
            lps = ras * (-1, -1, 1)
            np.testing.assert_allclose(found.TransformIndexToPhysicalPoint(index), lps, atol=1e-6)


def test_nrrd_over_the_nifti_in_one_program_is_the_same_image(tmp_path: Path) -> None:
    for order, signs in SIGNED_AXES:
        affine = affine_of(order, signs)
        nrrd = read(encode_nrrd(LABELS, affine), tmp_path / "mask.nrrd")
        nifti = read(encode_nifti(LABELS, affine), tmp_path / "mask.nii.gz")
        same = sitk.Resample(nifti, nrrd, sitk.Transform(), sitk.sitkNearestNeighbor)
        np.testing.assert_array_equal(sitk.GetArrayFromImage(same), sitk.GetArrayFromImage(nrrd))


def test_raw_nrrd_ends_with_the_voxels_first_axis_fastest() -> None:
    content = encode_nrrd(LABELS, np.eye(4), compress=False)
    header, _, voxels = content.partition(b"\n\n")
    assert b"encoding: raw" in header
    assert voxels == b"".join(bytes(LABELS[:, j, k]) for k in range(3) for j in range(7))


def test_units_are_converted_to_millimetres(tmp_path: Path) -> None:
    affine = np.diag([0.001, 0.002, 0.003, 1.0])
    found = read(encode_nrrd(LABELS, affine, 1000.0), tmp_path / "mask.nrrd")
    np.testing.assert_allclose(found.GetSpacing(), (1, 2, 3))


def test_equal_masks_give_equal_bytes_whatever_the_sign_of_zero() -> None:
    plus, minus = np.eye(4), np.eye(4)
    minus[:3, 3] = -0.0
    assert encode_nrrd(LABELS, plus) == encode_nrrd(LABELS, minus)
