"""NIfTI: every valid variant is read exactly, every invalid header is rejected with a reason."""

from __future__ import annotations

import gzip
import io
import tracemalloc
import zlib
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_store.errors import DamagedScan, ScanError, ScanTooLarge, UnsupportedScan
from model_store.scan import Limits, decode, encode_nifti
from tests.helpers.model_store.scan_files import CODES, nifti1

AFFINE = np.array([[2, 0, 0, -10], [0, 3, 0, -20], [0, 0, 4, -30], [0, 0, 0, 1.0]])


def ramp(dtype: str, shape: tuple[int, ...] = (9, 10, 11)) -> np.ndarray[Any, Any]:
    return (np.arange(np.prod(shape)) % 120).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("zipped", [False, True])
def test_nifti1_of_every_type_byte_order_and_packing_keeps_its_values(
    dtype: str, order: str, zipped: bool
) -> None:
    voxels = ramp(dtype)
    content = nifti1(voxels, order)
    scan = decode(gzip.compress(content) if zipped else content)
    assert scan.format == "nifti"
    assert scan.voxels.dtype == np.dtype(dtype)
    assert scan.voxels.dtype.isnative
    np.testing.assert_array_equal(scan.voxels[..., 0], voxels)
    np.testing.assert_allclose(scan.affine, AFFINE)
    assert scan.voxel_volume_ml == pytest.approx(0.024)
    assert not scan.voxels.flags.writeable


def test_nifti2_of_either_byte_order_keeps_values_and_affine() -> None:
    voxels = ramp("i2")
    for order in "<>":
        header = nib.Nifti2Header(endianness=order)
        header.set_data_dtype(np.dtype(order + "i2"))
        image = nib.Nifti2Image(voxels, AFFINE, header)
        scan = decode(image.to_bytes())
        np.testing.assert_array_equal(scan.voxels[..., 0], voxels)
        np.testing.assert_allclose(scan.affine, AFFINE)


@given(
    slope=st.floats(-50, 50, width=32).filter(lambda s: abs(s) > 1e-3),
    intercept=st.floats(-2000, 2000, width=32),
)
@settings(max_examples=30, deadline=None)
def test_slope_and_intercept_are_applied(slope: float, intercept: float) -> None:
    voxels = ramp("i2")
    scan = decode(nifti1(voxels, scl_slope=slope, scl_inter=intercept))
    np.testing.assert_allclose(scan.voxels[..., 0], voxels * slope + intercept, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("slope", [0.0, float("nan")])
def test_slope_of_zero_or_nan_leaves_voxels_unscaled(slope: float) -> None:
    voxels = ramp("u2")
    scan = decode(nifti1(voxels, scl_slope=slope, scl_inter=7.0))
    np.testing.assert_array_equal(scan.voxels[..., 0], voxels)


def test_scaling_that_overflows_is_rejected() -> None:
    with pytest.raises(DamagedScan, match="NaN or infinity"):
        decode(nifti1(ramp("f4") * np.float32(1e12), scl_slope=1e30))


def test_rgb_nifti_keeps_its_channels() -> None:
    rgb = np.arange(9 * 10 * 11 * 3, dtype=np.uint8).reshape(9, 10, 11, 3)
    stored = np.ascontiguousarray(np.moveaxis(rgb, -1, 0))
    content = nifti1(stored, dim=[3, 9, 10, 11], datatype=128)
    scan = decode(content)
    assert scan.channels == 3
    np.testing.assert_array_equal(scan.voxels, rgb)
    image = nib.Nifti1Image.from_bytes(content)
    for channel, name in enumerate("RGB"):
        np.testing.assert_array_equal(np.asarray(image.dataobj)[name], scan.voxels[..., channel])


@pytest.mark.parametrize("shape", [(9, 10), (9, 10, 1), (9, 10, 11, 1), (9, 10, 11, 1, 1)])
def test_grid_is_three_dimensional_for_any_singleton_axes(shape: tuple[int, ...]) -> None:
    voxels = ramp("i2", shape)
    scan = decode(nifti1(voxels))
    assert scan.grid == (*shape, 1, 1)[:3]
    np.testing.assert_array_equal(scan.voxels.ravel(), voxels.ravel())


def test_single_slice_without_thickness_is_read_with_a_note() -> None:
    scan = decode(nifti1(ramp("i2", (9, 10)), sform_code=0, qform_code=1, pixdim=[1.0, 2, 3, 0, 0, 0, 0, 0]))
    np.testing.assert_allclose(np.diag(scan.affine)[:3], (2, 3, 1))  # type: ignore[arg-type]
    assert "thickness" in scan.notes[0].text


def test_affine_from_qform_in_metres_gives_volume_in_ml() -> None:
    half = float(np.sqrt(0.5))
    pixdim = [1.0, 0.002, 0.003, 0.004, 0, 0, 0, 0]
    place = {"quatern": (0.0, 0.0, half), "qoffset": (1.0, 2.0, 3.0)}
    scan = decode(nifti1(ramp("i2"), sform_code=0, qform_code=1, pixdim=pixdim, units=1, **place))
    # A quarter turn about z: the first axis runs to anterior, the second to the left.
    expected = [[0, -0.003, 0, 1], [0.002, 0, 0, 2], [0, 0, 0.004, 3], [0, 0, 0, 1]]
    np.testing.assert_allclose(scan.affine, expected, atol=1e-6)
    assert scan.voxel_volume_ml == pytest.approx(0.024, rel=1e-3)


def test_scan_without_orientation_gets_default_affine_and_a_note() -> None:
    content = nifti1(ramp("i2"), sform_code=0)
    scan = decode(content)
    assert "orientation" in scan.notes[0].text
    assert "x from the patient's right to left" in scan.notes[0].text
    np.testing.assert_array_equal(scan.affine, nib.Nifti1Image.from_bytes(content).affine)
    # R is positive: x falls from one voxel to the next.
    assert scan.affine is not None
    assert scan.affine[0, 0] == -2


def test_pixdim_contradicting_the_affine_adds_a_note() -> None:
    scan = decode(nifti1(ramp("i2"), pixdim=[1.0, 1.0, 1.0, 1.0, 0, 0, 0, 0]))
    assert "pixdim" in scan.notes[0].text
    assert decode(nifti1(ramp("i2"))).notes == ()


NAN = float("nan")
QFORM = {"sform_code": 0, "qform_code": 1}
LIES: dict[str, tuple[dict[str, Any], type[ScanError], str]] = {
    "dim0-zero": ({"dim": [0, 9, 10, 11]}, DamagedScan, "dim"),
    "dim0-many": ({"dim": [9, 9, 10, 11]}, DamagedScan, "dim"),
    "negative": ({"dim": [3, -9, 10, 11]}, DamagedScan, "positive dimensions"),
    "larger": ({"dim": [3, 90, 10, 11]}, DamagedScan, "announces 90 x 10 x 11"),
    "smaller": ({"dim": [3, 9, 10, 2]}, DamagedScan, "more data follow"),
    "huge": ({"dim": [3, 30000, 30000, 30000]}, ScanTooLarge, "voxels"),
    "one-voxel": ({"dim": [3, 1, 1, 1]}, DamagedScan, "at least 8"),
    "line": ({"dim": [3, 990, 1, 1]}, DamagedScan, "at least 8"),
    "series": ({"dim": [4, 9, 10, 1, 11]}, UnsupportedScan, "one volume"),
    "offset-beyond": ({"vox_offset": 1e7}, DamagedScan, "found 0 bytes|can hold"),
    "offset-huge": ({"vox_offset": 3e38}, DamagedScan, "vox_offset is 3e\\+38"),
    "offset-inside": ({"vox_offset": 100.0}, DamagedScan, "vox_offset"),
    "offset-fraction": ({"vox_offset": 352.5}, DamagedScan, "vox_offset"),
    "offset-nan": ({"vox_offset": NAN}, DamagedScan, "vox_offset"),
    "complex": ({"datatype": 32}, UnsupportedScan, "datatype"),
    "float128": ({"datatype": 1536}, UnsupportedScan, "datatype"),
    "bits": ({"datatype": 1}, UnsupportedScan, "datatype"),
    "slope-infinite": ({"scl_slope": float("inf")}, DamagedScan, "scaling"),
    "affine-nan": ({"srow": [[NAN, 0, 0, 0], [0, 3, 0, 0], [0, 0, 4, 0]]}, DamagedScan, "finite affine"),
    "affine-flat": ({"srow": [[2, 2, 0, 0]] * 2 + [[0, 0, 4, 0]]}, DamagedScan, "three independent axes"),
    "affine-zero": ({"srow": [[0] * 4] * 3}, DamagedScan, "three independent axes"),
    "affine-huge": ({"srow": [[2e9, 0, 0, 0], [0, 3, 0, 0], [0, 0, 4, 0]]}, DamagedScan, "voxel sizes"),
    "pixdim-zero": ({**QFORM, "pixdim": [1.0, 2, 0, 4, 0, 0, 0, 0]}, DamagedScan, "pixdim"),
    "pixdim-nan": ({"sform_code": 0, "pixdim": [1.0, 2, NAN, 4, 0, 0, 0, 0]}, DamagedScan, "pixdim"),
    "quaternion": ({**QFORM, "quatern": (9.0, 9.0, 9.0)}, DamagedScan, "orientation"),
    "pair": ({"magic": b"ni1\0"}, UnsupportedScan, "pair"),
    "analyze": ({"magic": b"\0\0\0\0"}, UnsupportedScan, "ANALYZE"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("zipped", [False, True])
def test_invalid_header_is_rejected_with_its_reason(lie: str, order: str, zipped: bool) -> None:
    fields, error, reason = LIES[lie]
    voxels = ramp("i2") if lie != "smaller" else ramp("i2", (9, 10, 110))
    content = nifti1(voxels, order, **fields)
    with pytest.raises(error, match=reason):
        decode(gzip.compress(content) if zipped else content)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_single_non_finite_or_huge_voxel_is_rejected(value: float, dtype: str) -> None:
    voxels = ramp(dtype)
    voxels[4, 5, 6] = value
    with pytest.raises(DamagedScan, match="intensities"):
        decode(nifti1(voxels))


@pytest.mark.parametrize("keep", [0, 3, 4, 200, 347, 350, 360, -1])
def test_truncated_file_is_rejected(keep: int) -> None:
    content = nifti1(ramp("i2"))
    with pytest.raises(ScanError):
        decode(content[:keep])
    with pytest.raises(DamagedScan):
        decode(gzip.compress(content)[:-9])


def test_gzip_with_a_flipped_bit_is_rejected() -> None:
    stored = bytearray(gzip.compress(nifti1(ramp("i2")), 0))
    stored[-200] ^= 1
    with pytest.raises(DamagedScan, match="gzip"):
        decode(bytes(stored))


def test_gzip_bomb_is_rejected_in_bounded_memory() -> None:
    engine = zlib.compressobj(9, wbits=31)
    bomb = b"".join(engine.compress(bytes(2**20)) for _ in range(300)) + engine.flush()
    honest_start = nifti1(ramp("i2"))[:352]
    behind_header = zlib.compressobj(9, wbits=31)
    disguised = behind_header.compress(honest_start)
    disguised += b"".join(behind_header.compress(bytes(2**20)) for _ in range(300)) + behind_header.flush()
    liar = gzip.compress(nifti1(ramp("i2"), dim=[3, 500, 500, 500]))
    tracemalloc.start()
    for content in (bomb, disguised, liar):
        with pytest.raises(ScanError):
            decode(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_limits_accept_their_exact_value_and_reject_above_it() -> None:
    content = nifti1(ramp("i2"))
    exact = Limits(max_bytes=len(content), max_voxels=990, max_decompressed=352 + 1980)
    decode(content, exact)
    decode(gzip.compress(content), exact)
    for limits in (
        Limits(max_bytes=len(content) - 1),
        Limits(max_voxels=989),
        Limits(max_decompressed=352 + 1979),
    ):
        with pytest.raises(ScanTooLarge):
            decode(content, limits)


def test_encode_nifti_keeps_labels_and_affine_and_is_deterministic() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (9, 10, 11), dtype=np.uint8)
    turn = nib.eulerangles.euler2mat(0.3, 0.2, 0.1) @ np.diag([2.0, 3.0, 4.0])
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = turn, (1, 2, 3)
    content = encode_nifti(labels, affine)
    assert content == encode_nifti(np.asfortranarray(labels), affine)
    image = nib.Nifti1Image.from_stream(io.BytesIO(gzip.decompress(content)))
    np.testing.assert_array_equal(np.asarray(image.dataobj), labels)
    for form, code in (image.get_sform(coded=True), image.get_qform(coded=True)):
        assert code > 0
        np.testing.assert_allclose(form, affine, atol=1e-5)
    back = decode(content)
    np.testing.assert_array_equal(back.voxels[..., 0], labels)
    np.testing.assert_allclose(back.affine, affine, atol=1e-5)


def test_encode_nifti_keeps_a_sheared_affine() -> None:
    affine = np.array([[2, 0.4, 0, 1], [0, 3, 0, 2], [0, 0, 4, 3], [0, 0, 0, 1.0]])
    back = decode(encode_nifti(np.zeros((9, 10, 11), np.uint8), affine))
    np.testing.assert_allclose(back.affine, affine, atol=1e-6)


def test_encode_nifti_writes_nifti2_above_the_nifti1_size_limit() -> None:
    labels = np.zeros((40000, 8, 1), np.uint8)
    labels[39999] = 1
    assert int(decode(encode_nifti(labels, np.eye(4))).voxels[39999].min()) == 1
