"""ANALYZE and NIfTI of two files, as nibabel writes and reads them."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.errors import DamagedScan, ScanError, ScanTooLarge, UnsupportedScan
from model_store.scan import Limits, decode, decode_mask, deidentify
from model_store.scans.dicom.files import zip_of
from tests.helpers.model_store.scan_files import nifti1

CUBE = np.random.default_rng(0).integers(0, 200, (9, 10, 4))
AFFINE = np.array([[-2.0, 0, 0, 11], [0, 3, 0, -13], [0, 0, 4, -5], [0, 0, 0, 1]])
OBLIQUE = np.array([[-1.9, 0.3, 0, 11], [0.2, 2.9, 0.5, -13], [0, -0.4, 4, -5], [0, 0, 0, 1]])
ANALYZE = (nib.AnalyzeImage, nib.Spm99AnalyzeImage, nib.Spm2AnalyzeImage)
TYPES = ("u1", "<i2", ">i2", "<i4", "<f4", ">f8")
KEY = bytes(32)


def saved(
    kind: Any, folder: Path, dtype: str = "<i2", gz: str = "", affine: NDArray[Any] = AFFINE
) -> dict[str, bytes]:
    """Both files of CUBE, without SPM's .mat."""
    header = kind.header_class(endianness=dtype[0] if dtype[0] in "<>" else "<")
    header.set_data_dtype(np.dtype(dtype))
    nib.save(kind(CUBE.astype(dtype), affine, header), folder / f"a.img{gz}")
    for each in folder.glob("*.mat*"):
        each.unlink()
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def pair(header: bytes | None = None, voxels: bytes | None = None, **fields: Any) -> bytes:
    """A zip of a NIfTI pair, changed."""
    whole = nifti1(CUBE.astype("<i2"), magic=b"ni1\0", vox_offset=0.0, **fields)
    return zip_of((whole[:348] if header is None else header, whole[352:] if voxels is None else voxels))


def analyze(**fields: Any) -> bytes:
    """A header of ANALYZE."""
    header = nib.AnalyzeHeader()
    header.set_data_dtype(np.int16)
    header.set_data_shape(CUBE.shape)
    for name, value in fields.items():
        header[name] = value
    return bytes(header.binaryblock)


@pytest.mark.parametrize("gz", ["", ".gz"])
@pytest.mark.parametrize("kind", [*ANALYZE, nib.Nifti1Pair, nib.Nifti2Pair])
def test_what_nibabel_writes_is_read_as_it_reads_it(tmp_path: Path, kind: Any, gz: str) -> None:
    for dtype in TYPES:
        affine = AFFINE if kind in ANALYZE else OBLIQUE
        files = saved(kind, tmp_path, dtype, gz, affine)
        expected = kind.from_filename(tmp_path / f"a.img{gz}")
        # In any order, under any names: a zip of the service has numbers for names.
        for content in (files, zip_of(files.values()), zip_of(reversed(list(files.values())))):
            found = decode(content)
            np.testing.assert_array_equal(found.voxels[..., 0], CUBE)
            np.testing.assert_allclose(found.affine, expected.affine, atol=1e-5)
            assert found.format == "analyze"
            said = ["orientation-unknown"] if kind in ANALYZE else []
            assert [note.name for note in found.notes] == said
            assert not found.voxels.flags.writeable


def test_scale_and_origin_of_spm_are_used_as_nibabel_does(tmp_path: Path) -> None:
    files = saved(nib.Spm99AnalyzeImage, tmp_path)
    header = nib.Spm99AnalyzeHeader(files["a.hdr"])
    header["scl_slope"], header["origin"][:3] = 0.5, (3, 4, 2)
    (tmp_path / "a.hdr").write_bytes(header.binaryblock)
    expected = nib.load(tmp_path / "a.img")
    found = decode(content := zip_of((bytes(header.binaryblock), files["a.img"])))
    np.testing.assert_allclose(found.voxels[..., 0], expected.get_fdata())
    np.testing.assert_allclose(found.affine, expected.affine)
    assert found.affine is not None
    np.testing.assert_allclose(found.affine @ [2, 3, 1, 1], [0, 0, 0, 1])
    np.testing.assert_allclose(decode(deidentify(content, Limits(), KEY)).affine, found.affine)


def test_pair_is_a_mask_too() -> None:
    found = decode_mask(pair())
    np.testing.assert_array_equal(found.voxels, decode(nifti1(CUBE.astype("<i2"))).voxels)
    np.testing.assert_array_equal(found.affine, decode(nifti1(CUBE.astype("<i2"))).affine)


@pytest.mark.parametrize("kind", [*ANALYZE, nib.Nifti1Pair, nib.Nifti2Pair])
def test_a_scan_without_its_patient_is_the_same_scan(tmp_path: Path, kind: Any) -> None:
    files = saved(kind, tmp_path, gz="")
    # The first text of either header: of ANALYZE a name of the database, which often is the patient's.
    header = bytearray(files["a.hdr"])
    if len(header) == 348:
        header[14:19] = b"Meier"
    else:
        header[240:245] = b"Meier"
    content = zip_of((bytes(header), files["a.img"] + b"Anna"))
    clean = deidentify(content, Limits(), KEY)
    before, after = decode(content), decode(clean)
    assert not any(text in clean for text in (b"Meier", b"Anna"))
    np.testing.assert_array_equal(after.voxels, before.voxels)
    np.testing.assert_array_equal(after.affine, before.affine)
    assert (after.notes, after.format, after.voxels.dtype) == (
        before.notes,
        before.format,
        before.voxels.dtype,
    )
    assert deidentify(clean, Limits(), KEY) == clean


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        ({"a.hdr": analyze()}, UnsupportedScan, "found 1 headers and 0 other files"),
        ({"a.hdr": analyze(), "b.hdr": analyze()}, UnsupportedScan, "found 2 headers"),
        (zip_of((analyze(), CUBE.tobytes(), b"MATLAB 5.0")), UnsupportedScan, r"SPM has a \.mat"),
        (pair(analyze(datatype=128)), UnsupportedScan, "colours, of which the order is not fixed"),
        (pair(analyze(datatype=32)), UnsupportedScan, "datatype code 32"),
        (pair(analyze(vox_offset=-4)), DamagedScan, "the header says -4"),
        (pair(analyze(vox_offset=np.nan)), DamagedScan, "the header says nan"),
        (pair(analyze(dim=[4, 9, 10, 4, 3, 1, 1, 1])), UnsupportedScan, "9 x 10 x 4 x 3"),
        (pair(dim=[3, 9999, 9999, 9999]), ScanTooLarge, "the header announces 9999 x 9999 x 9999"),
        (pair(voxels=bytes(700)), DamagedScan, "found 700 bytes"),
        (pair(voxels=gzip.compress(bytes(2**24))), DamagedScan, "more data follow"),
        (pair(voxels=gzip.compress(bytes(720))[:-9]), DamagedScan, "ends in the middle"),
        (analyze(), UnsupportedScan, r"of a header \(\.hdr\) of ANALYZE send the voxels \(\.img\) too"),
        (nifti1(CUBE.astype("<i2"), magic=b"ni1\0"), UnsupportedScan, "pair, without its voxels"),
    ],
)
def test_what_cannot_be_read_is_refused_with_words(content: Any, error: type[ScanError], said: str) -> None:
    with pytest.raises(error, match=said):
        decode(content)


def test_limits_hold_before_anything_is_unpacked() -> None:
    content = pair(voxels=gzip.compress(CUBE.astype("<i2").tobytes(order="F")))
    assert decode(content).grid == CUBE.shape
    for limits in (Limits(max_voxels=359), Limits(max_decompressed=800), Limits(max_bytes=500)):
        with pytest.raises(ScanTooLarge):
            decode(content, limits)


def test_zip_that_another_method_packed_is_refused() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a.hdr", analyze())
        archive.writestr("a.img", CUBE.astype("<i2").tobytes(order="F"))
    with pytest.raises(UnsupportedScan, match="zip"):
        decode(packed.getvalue())
