"""Arrays and files as uploads."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from locum.errors import ScanInvalid
from locum.scans import opened


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int16, np.int64, np.float16, np.float64])
def test_volume_of_any_type_is_a_nifti_with_its_values(kind: type[np.generic]) -> None:
    voxels = np.arange(24).reshape(2, 3, 4).astype(kind)
    affine = np.diag([1.5, 2.0, 3.0, 1.0])
    with opened(voxels, affine) as upload:
        content = upload.rewound().read()
        assert upload.size == len(content)
        assert upload.sha256 == f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert b"".join(upload.pieces()) == content
    import gzip

    image = nib.Nifti1Image.from_bytes(gzip.decompress(content))
    assert np.array_equal(np.asarray(image.dataobj), voxels.astype(np.float64))
    assert np.array_equal(image.affine, affine)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_image_is_a_png_with_its_values(kind: type[np.generic]) -> None:
    pixels = (np.arange(12).reshape(3, 4) * 20).astype(kind)
    with opened(pixels) as upload, Image.open(io.BytesIO(upload.rewound().read())) as image:
        assert np.array_equal(np.asarray(image), pixels)


@pytest.mark.parametrize(
    ("voxels", "affine", "words"),
    [
        (np.zeros((2, 3, 4)), None, "with its `affine`"),
        (np.zeros((2, 3)), np.eye(4), "expected a volume"),
        (np.zeros((2, 3, 4)), np.eye(3), "expected a volume"),
        (np.zeros((2, 3)), None, "uint8 or uint16, found float64"),
    ],
)
def test_array_that_is_no_scan_is_rejected(
    voxels: NDArray[np.float64], affine: NDArray[np.float64] | None, words: str
) -> None:
    with pytest.raises(ScanInvalid, match=words), opened(voxels, affine):
        pass


def test_folder_without_dicom_and_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no scan")
    with pytest.raises(ScanInvalid, match="one DICOM series, found none"), opened(tmp_path):
        pass
    with pytest.raises(ScanInvalid, match=r"gone\.nii: .*No such file"), opened(tmp_path / "gone.nii"):
        pass
