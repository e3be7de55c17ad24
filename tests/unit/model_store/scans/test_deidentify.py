"""NIfTI, PNG and TIFF without their texts: the same scan to an independent reader, and no planted value."""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from model_store.scan import Limits, decode, deidentify
from tests.helpers.model_store.scan_files import tiff

PLANTED = b"Planted^Patient"
RNG = np.random.default_rng(5)
GREY = RNG.integers(0, 250, (37, 23)).astype(np.uint8)
VOLUME = RNG.integers(-900, 900, (9, 10, 11)).astype(np.int16)
AFFINE = np.array([[-0.8, 0.1, 0, 40], [0, 0.7, 0.2, -20], [0, 0, 2.5, 11], [0, 0, 0, 1.0]])


def cleaned(content: bytes) -> bytes:
    """De-identified, after the checks that hold for every format."""
    found = deidentify(content, Limits(), b"key")
    before, after = decode(content), decode(found)
    assert (before.format, before.voxels.dtype) == (after.format, after.voxels.dtype)
    np.testing.assert_array_equal(before.voxels, after.voxels)
    np.testing.assert_array_equal(before.affine, after.affine)  # type: ignore[arg-type]
    assert deidentify(found, Limits(), b"another key") == found
    return found


def nifti(kind: Any, order: str, extension: bytes = PLANTED) -> bytes:
    """Every field that holds text, an extension, and bytes after the voxels."""
    header = kind.header_class(endianness=order)
    header.set_data_dtype(VOLUME.dtype.newbyteorder(order))
    image = kind(VOLUME, AFFINE, header)
    for field in {"data_type", "db_name", "descrip", "aux_file", "intent_name", "unused_str"} & {
        *image.header.keys()
    }:
        image.header[field] = PLANTED[: image.header[field].dtype.itemsize]
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", extension))
    return bytes(image.to_bytes()) + PLANTED


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
def test_nifti_keeps_voxels_and_geometry_alone(kind: Any, order: str) -> None:
    content = nifti(kind, order)
    assert content.count(b"Planted^") >= 6
    found = cleaned(content)
    assert b"Plant" not in found
    image = kind.from_bytes(found)
    np.testing.assert_array_equal(np.asarray(image.dataobj), VOLUME)
    np.testing.assert_array_equal(image.affine, kind.from_bytes(content).affine)
    assert image.header.extensions == []
    assert len(found) == image.header.sizeof_hdr + 4 + VOLUME.nbytes


def test_gzip_of_a_nifti_loses_its_file_name_and_time() -> None:
    plain = nib.Nifti1Image(VOLUME, AFFINE).to_bytes()
    packed = io.BytesIO()
    with gzip.GzipFile(f"{PLANTED.decode()}.nii", "wb", fileobj=packed, mtime=1303983000) as file:
        file.write(plain)
    assert PLANTED in packed.getvalue()
    found = cleaned(packed.getvalue())
    assert PLANTED not in found
    assert found[4:8] == bytes(4)
    assert gzip.decompress(found) == plain


def test_gzip_with_a_time_alone_is_not_compressed_again() -> None:
    plain = nib.Nifti1Image(VOLUME, AFFINE).to_bytes()
    packed = gzip.compress(plain, 6, mtime=1303983000)
    found = cleaned(packed)
    assert found == packed[:4] + bytes(4) + packed[8:]
    assert gzip.decompress(found) == plain


@pytest.mark.parametrize(
    "hide",
    [
        lambda plain: gzip.compress(nifti(nib.Nifti1Image, "<"), mtime=0),
        lambda plain: gzip.compress(plain, mtime=0) + bytes(8) + PLANTED,
        lambda plain: gzip.compress(plain + PLANTED, mtime=0),
        lambda plain: gzip.compress(plain[:900], mtime=0) + named(plain[900:]),
    ],
    ids=["in the header", "after the last member", "after the voxels", "in the second member"],
)
def test_gzip_hides_no_planted_value(hide: Callable[[bytes], bytes]) -> None:
    found = cleaned(hide(nib.Nifti1Image(VOLUME, AFFINE).to_bytes()))
    assert PLANTED not in found
    assert b"Plant" not in gzip.decompress(found)
    assert found == gzip.compress(gzip.decompress(found), 1, mtime=0)


def named(content: bytes) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(PLANTED.decode(), "wb", fileobj=packed, mtime=0) as file:
        file.write(content)
    return packed.getvalue()


def png_of(array: NDArray[Any], **options: Any) -> bytes:
    info, exif = PngInfo(), Image.Exif()
    info.add_text("Patient", PLANTED.decode())
    info.add_text("Comment", PLANTED.decode() * 9, zip=True)
    info.add_itxt("Study", PLANTED.decode(), lang="en")
    exif[0x010E] = PLANTED.decode()
    content = io.BytesIO()
    Image.fromarray(array).save(content, "PNG", pnginfo=info, exif=exif, **options)
    chunk = b"tIME" + struct.pack(">HBBBBB", 2011, 4, 5, 6, 7, 8)
    end = content.getvalue().index(b"IEND") - 4
    time = struct.pack(">I", 7) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return content.getvalue()[:end] + time + content.getvalue()[end:] + PLANTED


@pytest.mark.parametrize(
    "array",
    [GREY, GREY.astype(np.uint16) * 200, np.dstack([GREY] * 3), GREY > 99],
    ids=["8 bits", "16 bits", "colour", "1 bit"],
)
def test_png_keeps_pixels_alone(array: NDArray[Any]) -> None:
    found = cleaned(png_of(array))
    assert PLANTED not in found
    kinds, position = [], 8
    while position < len(found):
        length, kind = struct.unpack_from(">I4s", found, position)
        kinds.append(kind)
        position += 12 + length
    assert {*kinds} == {b"IHDR", b"IDAT", b"IEND"}
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(found))), array)


def test_png_without_texts_is_unchanged() -> None:
    content = io.BytesIO()
    Image.fromarray(GREY).save(content, "PNG", transparency=3)
    assert cleaned(content.getvalue()) == content.getvalue()


TEXT_TAGS = (269, 270, 271, 305, 306, 315, 316, 33432, 65000)


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_adobe_deflate", "packbits"])
@pytest.mark.parametrize(
    "array",
    [GREY, GREY.astype(np.uint16) * 200, GREY.astype(np.float32) / 7, np.dstack([GREY] * 3), GREY > 99],
    ids=["8 bits", "16 bits", "float", "colour", "1 bit"],
)
def test_tiff_keeps_pixels_alone(array: NDArray[Any], compression: str | None) -> None:
    tags = ImageFileDirectory_v2()
    for tag in TEXT_TAGS:
        tags[tag] = PLANTED.decode()
    content = io.BytesIO()
    # Strips of a few rows, so that there are many to move.
    Image.fromarray(array).save(content, "TIFF", tiffinfo=tags, compression=compression, strip_size=200)
    planted = content.getvalue() + PLANTED
    assert planted.count(PLANTED) > len(TEXT_TAGS)
    found = cleaned(planted)
    assert PLANTED not in found
    image = Image.open(io.BytesIO(found))
    assert not {*TEXT_TAGS} & {*image.tag_v2}  # type: ignore[attr-defined]
    np.testing.assert_array_equal(np.array(image), array)


@pytest.mark.parametrize("dtype", [">i1", ">u2", ">u4", ">f4"])
def test_big_endian_tiff_keeps_pixels_alone(dtype: str) -> None:
    words = struct.unpack(f"<{len(PLANTED) // 4}I", PLANTED[: len(PLANTED) // 4 * 4])
    content = tiff(GREY.astype(dtype), ">", t315=words)
    assert struct.pack(f">{len(words)}I", *words) in content
    found = cleaned(content)
    assert struct.pack(f">{len(words)}I", *words) not in found
    assert found[:2] == b"MM"


def test_tiled_tiff_keeps_its_tiles() -> None:
    tiles = RNG.integers(0, 255, (2, 2, 16, 16)).astype(np.uint8)
    data = [tile.tobytes() + PLANTED for row in tiles for tile in row]
    offsets, position = [], 8
    for one in data:
        offsets.append(position)
        position += len(one)
    arrays = struct.pack("<4I", *offsets) + struct.pack("<4I", *[256] * 4)
    entries = [
        (256, 3, 1, struct.pack("<HH", 30, 0)),
        (257, 3, 1, struct.pack("<HH", 20, 0)),
        (258, 3, 1, struct.pack("<HH", 8, 0)),
        (259, 3, 1, struct.pack("<HH", 1, 0)),
        (262, 3, 1, struct.pack("<HH", 1, 0)),
        (322, 3, 1, struct.pack("<HH", 16, 0)),
        (323, 3, 1, struct.pack("<HH", 16, 0)),
        (324, 4, 4, struct.pack("<I", position)),
        (325, 4, 4, struct.pack("<I", position + 16)),
    ]
    directory = struct.pack("<H", len(entries)) + b"".join(
        struct.pack("<HHI4s", tag, kind, count, raw) for tag, kind, count, raw in entries
    )
    start = struct.pack("<I", position + len(arrays))
    content = b"II*\0" + start + b"".join(data) + arrays + directory + bytes(4)
    found = cleaned(content)
    assert PLANTED not in found
    whole = tiles.transpose(0, 2, 1, 3).reshape(32, 32)[:20, :30]
    np.testing.assert_array_equal(decode(found).voxels[..., 0], whole)
