"""Scans with two forms: masks lie on them in nibabel and in ITK, which take different ones."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from numpy.typing import NDArray

from model_store.errors import DamagedScan, MaskMismatch
from model_store.preprocessing import align, geometry_of, prepare_mask
from model_store.scan import Scan, decode, encode_nifti, encode_nrrd
from model_store.task import Task

TASK = Task(name="t", labels={"a": (1,)}, size=(16, 16))
VOXELS = np.arange(16 * 18 * 6).reshape(16, 18, 6).astype(np.int16)


def turned(degrees: float) -> NDArray[np.float64]:
    angle = np.deg2rad(degrees)
    matrix = np.eye(4)
    matrix[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return matrix


SCANNER = np.array([[-2.0, 0, 0, 64], [0, -2.0, 0, 64], [0, 0, 6.0, -18], [0, 0, 0, 1]])
ATLAS = np.array([[-2.0, 0, 0, 90], [0, -2.0, 0, 30], [0, 0, 6.0, -40], [0, 0, 0, 1]])
SHEARED = SCANNER + np.array([[0, 0.3, 0, 0], *[[0] * 4] * 3])
LARGER = SCANNER * [[1.1], [1.1], [1.1], [1]]
FORMS = {
    "atlas": ATLAS,
    "turned": turned(10) @ SCANNER,
    "sheared": SHEARED,
    "hardly sheared": SCANNER + np.array([[0, 1e-4, 0, 0], *[[0] * 4] * 3]),
    "larger": LARGER,
    "equal": SCANNER,
}


def nifti(sform: NDArray[np.float64], qform_code: int, sform_code: int) -> Any:
    image = nib.Nifti1Image(VOXELS, SCANNER)
    image.set_qform(SCANNER, qform_code)
    image.set_sform(sform, sform_code)
    return image


def by_itk(content: bytes, path: Path) -> NDArray[np.float64] | None:
    """The affine by which ITK reads a file: voxel index -> LPS in mm; None where it refuses."""
    path.write_bytes(content)
    try:
        image = sitk.ReadImage(str(path))
    except RuntimeError:
        return None
    affine = np.eye(4)
    affine[:3, :3] = np.array(image.GetDirection()).reshape(3, 3) * np.array(image.GetSpacing())
    affine[:3, 3] = image.GetOrigin()
    return affine


def masks_of(scan: Scan) -> tuple[bytes, bytes]:
    labels = (scan.voxels[..., 0] % 2).astype(np.uint8)
    assert scan.affine is not None
    assert scan.affine_by_itk is not None
    plain = gzip.decompress(encode_nifti(labels, scan.affine, scan.mm_per_unit, scan.forms))
    return plain, encode_nrrd(labels, scan.affine_by_itk, scan.mm_per_unit)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("sform_code", [0, 1, 2, 4])
@pytest.mark.parametrize("qform_code", [0, 1, 2])
def test_the_mask_lies_on_the_scan_in_every_reader(
    name: str, qform_code: int, sform_code: int, tmp_path: Path
) -> None:
    content = nifti(FORMS[name], qform_code, sform_code).to_bytes()
    mask, nrrd = masks_of(decode(content))
    scan, found = (nib.Nifti1Image.from_bytes(each) for each in (content, mask))
    np.testing.assert_array_equal(found.affine, scan.affine)
    for field in ("qform_code", "sform_code", "quatern_b", "qoffset_x", "srow_x", "srow_y", "srow_z"):
        np.testing.assert_array_equal(found.header[field], scan.header[field])
    np.testing.assert_array_equal(found.header["pixdim"][:4], scan.header["pixdim"][:4])
    expected = by_itk(content, tmp_path / "scan.nii")
    if expected is None:
        assert (qform_code, name) == (0, "sheared")  # ITK reads neither the scan nor the mask
        assert by_itk(mask, tmp_path / "mask.nii") is None
        return
    for kind, answer in (("nii", mask), ("nrrd", nrrd)):
        read = by_itk(answer, tmp_path / f"mask.{kind}")
        assert read is not None
        # ITK makes a hardly sheared sform perpendicular, for which 1e-4 over the grid is the room.
        np.testing.assert_allclose(read, expected, atol=2e-4, err_msg=kind)


def test_a_warning_names_the_distance_of_the_forms() -> None:
    (note,) = decode(nifti(ATLAS, 1, 4).to_bytes()).notes
    assert note.name == "two-positions"
    distance = np.linalg.norm((ATLAS - SCANNER)[:3, 3])
    assert f"up to {distance:.3g} mm" in note.text
    assert "two-positions" not in {each.name for each in decode(nifti(SCANNER, 1, 1).to_bytes()).notes}


@pytest.mark.parametrize(
    ("offset", "values"),
    [
        (76, (0.0,)),
        (76, (5.0,)),
        (256, (0.0, 0.0, 1 + 2e-7)),
        (256, (0.0, 0.0, 1 + 1e-6)),
        (256, (0.0, 0.0, 1 + 1e-4)),
    ],
)
def test_qfac_of_zero_and_a_rounded_quaternion_are_read_as_by_itk(
    offset: int, values: tuple[float, ...], tmp_path: Path
) -> None:
    """ITK reads by the standard's own library, nifti1_io."""
    header = bytearray(nifti(SCANNER, 1, 0).to_bytes())
    struct.pack_into(f"<{len(values)}f", header, offset, *values)
    scan, expected = decode(bytes(header)), by_itk(bytes(header), tmp_path / "scan.nii")
    assert scan.affine is not None
    assert expected is not None
    np.testing.assert_allclose(np.diag([-1, -1, 1, 1]) @ scan.affine, expected, atol=1e-4)
    mask, _ = masks_of(scan)
    np.testing.assert_allclose(by_itk(mask, tmp_path / "mask.nii"), expected, atol=1e-6)


def test_any_qform_is_read_as_by_nibabel() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        rotation = np.linalg.qr(draw.normal(size=(3, 3)))[0]
        affine = np.eye(4)
        affine[:3, :3], affine[:3, 3] = rotation * draw.uniform(0.5, 4, 3), draw.normal(size=3) * 50
        image = nib.Nifti1Image(VOXELS, affine)
        image.set_sform(None, 0)
        image.set_qform(affine, 1)
        image = nib.Nifti1Image.from_bytes(image.to_bytes())
        np.testing.assert_allclose(decode(image.to_bytes()).affine, image.affine, atol=1e-5)


@pytest.mark.parametrize("by", ["qform alone", "both by the qform", "own sform is stale"])
def test_a_mask_drawn_by_the_other_form_is_recognised(by: str) -> None:
    """As ITK writes it: resampling it onto the scan's grid would move its labels."""
    scan = decode(nifti(ATLAS, 1, 4).to_bytes())
    labels = nib.Nifti1Image((VOXELS % 2).astype(np.uint8), SCANNER)
    labels.set_qform(SCANNER, 1)
    labels.set_sform(None if by == "qform alone" else SCANNER, 0 if by == "qform alone" else 1)
    if by == "own sform is stale":
        scan, labels = decode(nifti(SCANNER, 0, 1).to_bytes()), nifti(ATLAS, 1, 4)
    mask = decode(labels.to_bytes())
    for check in (
        lambda: align(mask, scan.grid, scan.affine, scan.other_affine),
        lambda: prepare_mask(mask, TASK, geometry_of(scan, TASK)),
    ):
        with pytest.raises(MaskMismatch, match=r"its labels are in the right voxels, so do not resample it"):
            check()
    elsewhere = nib.Nifti1Image((VOXELS % 2).astype(np.uint8), turned(90) @ ATLAS @ turned(45))
    with pytest.raises(MaskMismatch, match="their affines differ"):
        align(decode(elsewhere.to_bytes()), scan.grid, scan.affine, scan.other_affine)


def test_a_quaternion_that_is_no_rotation_is_rejected() -> None:
    header = bytearray(nifti(SCANNER, 1, 0).to_bytes())
    struct.pack_into("<3f", header, 256, 0.0, 0.0, 1.1)
    with pytest.raises(DamagedScan, match="at most length 1"):
        decode(bytes(header))
