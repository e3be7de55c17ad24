"""Masks as the service encodes them, against an independent reader of NRRD."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from locum.errors import AnswerInvalid
from locum.masks import read_nrrd, segmentation
from model_store.scan import encode_nrrd

AFFINE = np.array([[0.0, -0.7, 0.1, 12.5], [0.8, 0.0, 0.0, -31.0], [0.0, 0.1, 2.5, 40.0], [0, 0, 0, 1]])


@pytest.mark.parametrize("compress", [True, False])
def test_mask_is_where_itk_reads_it(tmp_path: Path, compress: bool) -> None:
    labels = np.random.default_rng(0).integers(0, 3, (4, 5, 6), np.uint8)
    content = encode_nrrd(labels, AFFINE, compress=compress)
    voxels, affine = read_nrrd(content)
    assert np.array_equal(voxels, labels)
    assert np.allclose(affine, AFFINE)
    (tmp_path / "mask.nrrd").write_bytes(content)
    image = sitk.ReadImage(str(tmp_path / "mask.nrrd"))
    for index in ((0, 0, 0), (3, 4, 5), (1, 2, 3)):
        lps = image.TransformIndexToPhysicalPoint(index)
        assert np.allclose(nib.affines.apply_affine(affine, index), (-lps[0], -lps[1], lps[2]))
        assert image[index] == voxels[index]


@pytest.mark.parametrize(
    "change",
    [
        (b"uint8", b"int16"),
        (b"left-posterior-superior", b"right-anterior-superior"),
        (b"sizes: 4 5 6", b"sizes: 4 5 7"),
        (b"space origin", b"no origin"),
    ],
)
def test_nrrd_of_another_kind_is_rejected(change: tuple[bytes, bytes]) -> None:
    content = encode_nrrd(np.zeros((4, 5, 6), np.uint8), AFFINE)
    with pytest.raises(AnswerInvalid, match="NRRD"):
        read_nrrd(content.replace(*change))


def test_answer_that_is_no_form_is_rejected() -> None:
    with pytest.raises(AnswerInvalid, match="params and image"):
        segmentation(b"{}", "application/json")
