"""NRRD and MetaImage, as SimpleITK writes them and field by field."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK as sitk
from numpy.typing import NDArray

from model_store.errors import DamagedScan, ScanError, ScanTooLarge, UnsupportedScan
from model_store.scan import Limits, decode, decode_mask, deidentify, encode_nrrd

CUBE = np.random.default_rng(0).integers(0, 900, (9, 10, 4))
TYPES = [
    *(sitk.sitkInt8, sitk.sitkUInt8, sitk.sitkInt16, sitk.sitkUInt16, sitk.sitkInt32, sitk.sitkUInt32),
    *(sitk.sitkInt64, sitk.sitkUInt64, sitk.sitkFloat32, sitk.sitkFloat64),
]
SUFFIXES = (".nrrd", ".mha")
KEY = bytes(32)


def image(kind: int = sitk.sitkInt16, values: NDArray[Any] = CUBE) -> Any:
    """Voxels [I, J, K] or [I, J, K, C], turned about two axes."""
    vectors = values.ndim == 4
    axes = (2, 1, 0, 3)[: values.ndim]
    found = sitk.GetImageFromArray(values.transpose(axes).astype(np.int64), isVector=vectors)
    found = sitk.Cast(found, kind)
    turn = sitk.Euler3DTransform()
    turn.SetRotation(0.3, 0.0, -0.2)
    found.SetDirection(turn.GetMatrix())
    found.SetSpacing((0.7, 1.1, 2.5))
    found.SetOrigin((-30.5, 12.25, 100.125))
    return found


def written(found: Any, path: Path, *, compress: bool = False) -> bytes:
    sitk.WriteImage(found, str(path), compress)
    return path.read_bytes()


def affine_of(found: Any) -> NDArray[np.float64]:
    lps = np.eye(4)
    lps[:3, :3] = np.array(found.GetDirection()).reshape(3, 3) * found.GetSpacing()
    lps[:3, 3] = found.GetOrigin()
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ lps


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", TYPES)
def test_what_simpleitk_writes_is_read_as_it_reads_it(
    tmp_path: Path, suffix: str, kind: int, compress: bool
) -> None:
    own = image(kind, CUBE % 100)
    found = decode(written(own, tmp_path / f"a{suffix}", compress=compress))
    np.testing.assert_array_equal(found.voxels[..., 0], CUBE % 100)
    np.testing.assert_allclose(found.affine, affine_of(own), atol=1e-9)
    assert (found.notes, found.mm_per_unit) == ((), 1.0)
    assert not found.voxels.flags.writeable


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("channels", [2, 3, 4])
def test_colours_and_channels_are_values_of_a_voxel(tmp_path: Path, suffix: str, channels: int) -> None:
    values = np.random.default_rng(1).integers(0, 200, (9, 10, 4, channels))
    colours = written(image(sitk.sitkVectorUInt8, values), tmp_path / f"a{suffix}")
    if channels > 2 and suffix == ".mha":
        assert decode(colours).voxels.shape == (9, 10, 4, 3)
        np.testing.assert_array_equal(decode(colours).voxels, values[..., :3])
    several = written(image(sitk.sitkVectorInt16, values), tmp_path / f"b{suffix}")
    np.testing.assert_array_equal(decode(several, Limits(max_channels=channels)).voxels, values)
    with pytest.raises(
        UnsupportedScan, match=f"expected one volume of 3 dimensions, found {channels} values"
    ):
        decode(several)


def nrrd(*lines: str, data: bytes | None = None, space: str = "left-posterior-superior") -> bytes:
    """An NRRD in which the last line of a field replaces the usual one; `-name` leaves it out."""
    fields = {
        "type": "short",
        "dimension": "3",
        "space": space,
        "sizes": "9 10 4",
        "space directions": "(1,0,0) (0,2,0) (0,0,3)",
        "kinds": "domain domain domain",
        "endian": "little",
        "encoding": "raw",
        "space origin": "(5,6,7)",
    }
    for line in lines:
        name, _, value = line.partition(": ")
        if name.startswith("-"):
            del fields[name[1:]]
        else:
            fields[name] = value
    header = "\n".join(("NRRD0004", *(f"{name}: {value}" for name, value in fields.items())))
    return f"{header}\n\n".encode() + (CUBE.astype("<i2").tobytes(order="F") if data is None else data)


def mha(*lines: str, data: bytes | None = None) -> bytes:
    """A MetaImage, changed in the same way."""
    fields = {
        "ObjectType": "Image",
        "NDims": "3",
        "BinaryData": "True",
        "BinaryDataByteOrderMSB": "False",
        "CompressedData": "False",
        "TransformMatrix": "1 0 0 0 1 0 0 0 1",
        "Offset": "5 6 7",
        "ElementSpacing": "1 2 3",
        "DimSize": "9 10 4",
        "ElementType": "MET_SHORT",
        "ElementDataFile": "LOCAL",
    }
    for line in lines:
        name, _, value = line.partition(" = ")
        if name.startswith("-"):
            del fields[name[1:]]
        else:
            fields[name] = value
    last = fields.pop("ElementDataFile", None)
    pairs = [*fields.items(), *([] if last is None else [("ElementDataFile", last)])]
    header = "".join(f"{name} = {value}\n" for name, value in pairs)
    return header.encode() + (CUBE.astype("<i2").tobytes(order="F") if data is None else data)


@pytest.mark.parametrize(
    ("content", "diagonal"),
    [
        (nrrd(), (-1, -2, 3)),
        (nrrd(space="RAS"), (1, 2, 3)),
        (nrrd(space="left-anterior-superior"), (-1, 2, 3)),
        (nrrd("-space", "space dimension: 3"), (-1, -2, 3)),
        (nrrd("-space", "-space directions", "-space origin", "spacings: 1 2 3"), (-1, -2, 3)),
        (mha(), (-1, -2, 3)),
        (mha("-TransformMatrix", "Rotation = 1 0 0 0 1 0 0 0 1"), (-1, -2, 3)),
        (mha("-TransformMatrix"), (-1, -2, 3)),
    ],
)
def test_spaces_lead_to_ras_and_a_header_without_one_is_noted(
    content: bytes, diagonal: tuple[float, ...]
) -> None:
    found = decode(content)
    assert found.affine is not None
    np.testing.assert_allclose(np.diag(found.affine)[:3], diagonal)
    np.testing.assert_array_equal(found.voxels[..., 0], CUBE)
    given = (b"space: " in content) or b"Rotation" in content or b"TransformMatrix" in content
    assert [note.name for note in found.notes] == ([] if given else ["orientation-unknown"])


@pytest.mark.parametrize(
    "content",
    [
        nrrd("endian: big", data=CUBE.astype(">i2").tobytes(order="F")),
        nrrd("encoding: gzip", data=gzip.compress(CUBE.astype("<i2").tobytes(order="F"))),
        nrrd(
            "dimension: 4",
            "sizes: 9 10 4 1",
            "kinds: domain domain domain list",
            "space directions: (1,0,0) (0,2,0) (0,0,3) none",
        ),
        nrrd().replace(b"\n", b"\r\n", 10).replace(b"\n\n", b"\n\r\n", 1),
        mha("BinaryDataByteOrderMSB = True", data=CUBE.astype(">i2").tobytes(order="F")),
        mha("CompressedData = True", data=zlib.compress(CUBE.astype("<i2").tobytes(order="F"))),
        mha("NDims = 4", "DimSize = 9 10 4 1", "ElementSpacing = 1 2 3 1", "Offset = 5 6 7 0").replace(
            b"TransformMatrix = 1 0 0 0 1 0 0 0 1", b"TransformMatrix = 1 0 0 0 0 1 0 0 0 0 1 0 0 0 0 1"
        ),
    ],
)
def test_byte_orders_compressions_and_an_axis_of_one_are_read(content: bytes) -> None:
    np.testing.assert_array_equal(decode(content).voxels[..., 0], CUBE)


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (nrrd("data file: ../secret.raw"), UnsupportedScan, "in the same file"),
        (mha("ElementDataFile = /etc/passwd"), UnsupportedScan, "in the same file"),
        (nrrd("encoding: bzip2"), UnsupportedScan, "encoding raw or gzip"),
        (nrrd("type: block"), UnsupportedScan, "found type 'block'"),
        (mha("ElementType = MET_STRING"), UnsupportedScan, "'MET_STRING'"),
        (nrrd("dimension: 2", "sizes: 9 10"), UnsupportedScan, "PNG or TIFF"),
        (mha("NDims = 2", "DimSize = 9 10"), UnsupportedScan, "PNG or TIFF"),
        (nrrd("byte skip: -1"), UnsupportedScan, "skipped"),
        (mha("HeaderSize = -1"), UnsupportedScan, "right behind the header"),
        (nrrd("-sizes"), DamagedScan, "the field `sizes`"),
        (mha("-DimSize"), DamagedScan, "the field DimSize"),
        (nrrd("sizes: 9 10"), DamagedScan, "expected 3 whole numbers"),
        (nrrd("sizes: 9 10 -4"), DamagedScan, "expected 3 whole numbers"),
        (nrrd("sizes: 9 1 1"), DamagedScan, "at least 8 voxels along two axes"),
        (nrrd("space directions: (nan,0,0) (0,2,0) (0,0,3)"), DamagedScan, "expected 3 numbers"),
        (nrrd("space directions: (1,0,0) (1,0,0) (0,0,3)"), DamagedScan, "three independent axes"),
        (nrrd("space directions: (0,0,0) (0,2,0) (0,0,3)"), DamagedScan, "positive length"),
        (mha("ElementSpacing = 0 2 3"), DamagedScan, "positive length"),
        (nrrd('space units: "furlong" "furlong" "furlong"'), UnsupportedScan, "space units"),
        (nrrd(data=b"\0" * 700), DamagedScan, "announces 720 bytes of voxels, found 700"),
        (nrrd(data=b"\0" * 7200), DamagedScan, "found more"),
        (mha(data=b"\0" * 700), DamagedScan, "announces 720 bytes of voxels, found 700"),
        (nrrd("encoding: gzip", data=b"\x1f\x8b\x08" + bytes(9)), DamagedScan, "damaged|ends in the middle"),
        (mha("CompressedData = True", data=b"no zlib"), DamagedScan, "damaged"),
        (nrrd("sizes: 9999 9999 9999"), ScanTooLarge, "voxels, the header announces"),
        (nrrd().replace(b"\n\n", b"\n", 1)[:200], DamagedScan, "empty line after the header"),
        (nrrd("data file: x.raw").partition(b"\n\n")[0] + b"\n", UnsupportedScan, r"in another \(.nhdr\)"),
        (mha("-ElementDataFile")[:150], DamagedScan, "ends with ElementDataFile"),
        (nrrd().replace(b"type: short", b"type: short\ntype: float"), DamagedScan, "found `type` twice"),
        (b"NRRD0009\n" + nrrd()[9:], UnsupportedScan, "NRRD of a version"),
    ],
)
def test_what_cannot_be_read_is_refused_with_words(content: bytes, error: type[ScanError], said: str) -> None:
    with pytest.raises(error, match=said):
        decode(content)


@pytest.mark.parametrize("make", [nrrd, mha])
def test_a_bomb_is_refused_before_it_is_unpacked(make: Callable[..., bytes]) -> None:
    packed = gzip.compress(bytes(2**24))
    content = (
        nrrd("sizes: 400 400 400", "encoding: gzip", data=packed)
        if make is nrrd
        else mha("DimSize = 400 400 400", "CompressedData = True", data=zlib.compress(bytes(2**24)))
    )
    with pytest.raises(DamagedScan, match=r"more than .* compressed bytes can hold"):
        decode(content)
    small = nrrd("encoding: gzip", data=packed) if make is nrrd else mha("CompressedData = True", data=packed)
    with pytest.raises(DamagedScan, match="found more"):
        decode(small)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_scan_without_its_patient_is_the_same_scan(tmp_path: Path, suffix: str, compress: bool) -> None:
    own = image()
    own.SetMetaData("PatientName", "Meier^Anna")
    content = written(own, tmp_path / f"a{suffix}", compress=compress)
    assert b"Meier" in content
    clean = deidentify(content, Limits(), KEY)
    before, after = decode(content), decode(clean)
    assert b"Meier" not in clean
    np.testing.assert_array_equal(after.voxels, before.voxels)
    np.testing.assert_array_equal(after.affine, before.affine)
    assert (after.notes, after.format, after.mm_per_unit) == (before.notes, before.format, before.mm_per_unit)
    assert deidentify(clean, Limits(), KEY) == clean
    (tmp_path / f"b{suffix}").write_bytes(clean)
    again = sitk.ReadImage(str(tmp_path / f"b{suffix}"))
    np.testing.assert_array_equal(sitk.GetArrayFromImage(again), sitk.GetArrayFromImage(own))
    np.testing.assert_allclose(affine_of(again), affine_of(own), atol=1e-9)


@pytest.mark.parametrize(
    "content",
    [
        nrrd(space="RAS"),
        nrrd("-space", "space dimension: 3"),
        nrrd('space units: "cm" "cm" "cm"'),
        mha("-TransformMatrix", "-Offset", "Comment = Anna"),
        mha("DistanceUnits = um", "Modality = MET_MOD_CT", "Name = Anna"),
    ],
)
def test_what_is_cleaned_keeps_units_modality_and_notes(content: bytes) -> None:
    before, after = decode(content), decode(clean := deidentify(content, Limits(), KEY))
    np.testing.assert_array_equal(after.affine, before.affine)
    assert (after.notes, after.mm_per_unit, after.modality) == (
        before.notes,
        before.mm_per_unit,
        before.modality,
    )
    assert b"Anna" not in clean


def test_own_mask_is_read_as_a_mask_and_overlapping_segments_are_refused() -> None:
    labels = (CUBE > 450).astype(np.uint8)
    affine = np.array([[-1.0, 0, 0, 5], [0, 0.5, 0.2, 6], [0, -0.2, 2, 7], [0, 0, 0, 1]])
    for compress in (True, False):
        found = decode_mask(encode_nrrd(labels, affine, compress=compress))
        np.testing.assert_array_equal(found.voxels[..., 0], labels)
        np.testing.assert_array_equal(found.affine, affine)
    layers = nrrd(
        "dimension: 4",
        "sizes: 2 9 10 4",
        "kinds: list domain domain domain",
        "space directions: none (1,0,0) (0,2,0) (0,0,3)",
        data=np.zeros((2, 9, 10, 4), "<i2").tobytes(),
    )
    with pytest.raises(UnsupportedScan, match="export it as a labelmap"):
        decode_mask(layers)
