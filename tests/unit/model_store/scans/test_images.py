"""PNG and TIFF: exact pixels, and rejection of every unsupported or damaged file."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model_store.errors import DamagedScan, ScanError, ScanTooLarge, UnsupportedScan
from model_store.scan import Limits, decode, encode_png
from tests.helpers.model_store import dicom_files
from tests.helpers.model_store.scan_files import png, tiff


def ramp(dtype: str, shape: tuple[int, ...] = (16, 12)) -> np.ndarray[Any, Any]:
    return (np.arange(np.prod(shape)) * 37 % 251).reshape(shape).astype(dtype)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def rows(pixels: np.ndarray[Any, Any]) -> bytes:
    big = pixels.astype(pixels.dtype.newbyteorder(">"))
    return b"".join(b"\0" + row.tobytes() for row in big)


def test_grey_png_of_8_and_16_bits_keeps_its_values_and_dtype() -> None:
    for dtype, bits in (("u1", 8), ("u2", 16)):
        pixels = ramp(dtype) * np.dtype(dtype).type(1 if bits == 8 else 257)
        scan = decode(png(12, 16, bits, 0, rows(pixels)))
        assert (scan.format, scan.affine, scan.voxel_volume_ml) == ("png", None, None)
        assert scan.voxels.dtype == dtype
        np.testing.assert_array_equal(scan.voxels[..., 0], pixels)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_grey_image_of_less_than_8_bits_keeps_its_values(bits: int) -> None:
    pixels = ramp("u1", (16, 16)) % 2**bits
    # Each sample's lowest bits, the first sample highest in its byte.
    packed = np.packbits(np.unpackbits(pixels[..., None], axis=2)[..., -bits:].reshape(16, -1), axis=1)
    np.testing.assert_array_equal(decode(png(16, 16, bits, 0, rows(packed))).voxels[..., 0], pixels)
    for photometric in (0, 1):  # 0 is white, or black
        shown = pixels if photometric else 2**bits - 1 - pixels
        found = decode(tiff(packed, t256=16, t258=bits, t262=photometric)).voxels[..., 0]
        np.testing.assert_array_equal(found, shown)


def test_png_alpha_channel_is_dropped_where_opaque() -> None:
    rgb = ramp("u1", (16, 12, 3))
    opaque = np.dstack([rgb, np.full((16, 12), 255, np.uint8)])
    for content in (png(12, 16, 8, 2, rows(rgb)), png(12, 16, 8, 6, rows(opaque))):
        np.testing.assert_array_equal(decode(content).voxels, rgb)
    grey = np.dstack([rgb[..., 0], np.full((16, 12), 255, np.uint8)])
    np.testing.assert_array_equal(decode(png(12, 16, 8, 4, rows(grey))).voxels, rgb[..., :1])


def test_png_with_transparent_pixels_is_rejected() -> None:
    rgba = np.dstack([ramp("u1", (16, 12, 3)), ramp("u1")])
    with pytest.raises(UnsupportedScan, match="transparent"):
        decode(png(12, 16, 8, 6, rows(rgba)))


def test_palette_png_decodes_to_its_colours() -> None:
    palette = bytes([10, 20, 30, 200, 100, 50])
    scan = decode(png(12, 16, 8, 3, rows(ramp("u1") % 2), (b"PLTE", palette)))
    assert {tuple(map(int, pixel)) for pixel in scan.voxels.reshape(-1, 3)} == {(10, 20, 30), (200, 100, 50)}


def test_palette_png_without_its_palette_is_rejected() -> None:
    with pytest.raises(DamagedScan, match="palette"):
        decode(png(12, 16, 8, 3, rows(ramp("u1") % 2)))


def test_grey_png_keeps_a_value_marked_transparent() -> None:
    pixels = ramp("u1")
    scan = decode(png(12, 16, 8, 0, rows(pixels), (b"tRNS", b"\0\0")))
    np.testing.assert_array_equal(scan.voxels[..., 0], pixels)


def test_16_bit_colour_png_is_read_as_8_bit_with_a_note() -> None:
    scan = decode(png(12, 16, 16, 2, rows(ramp("u2", (16, 12, 3)) * np.uint16(257))))
    np.testing.assert_array_equal(scan.voxels, ramp("u1", (16, 12, 3)))
    assert "16 bits" in scan.notes[0].text


def test_compressed_metadata_in_png_is_not_decompressed() -> None:
    bomb = zlib.compress(bytes(200 * 2**20), 9)
    text = (b"zTXt", b"Comment\0\0" + bomb)
    profile = (b"iCCP", b"icc\0\0" + bomb)
    content = png(12, 16, 8, 0, rows(ramp("u1")), text, profile, (b"iTXt", b"k\0\1\0\0\0" + bomb))
    tracemalloc.start()
    np.testing.assert_array_equal(decode(content).voxels[..., 0], ramp("u1"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_image_above_max_pixels_is_rejected_from_its_header() -> None:
    with pytest.raises(ScanTooLarge, match="20000 x 20000"):
        decode(png(20000, 20000, 8, 0, bytes(1000)))
    with pytest.raises(ScanTooLarge, match="20000 x 20000"):
        decode(tiff(ramp("u1"), t256=20000, t257=20000))
    limits = Limits(max_pixels=16 * 12)
    decode(png(12, 16, 8, 0, rows(ramp("u1"))), limits)
    with pytest.raises(ScanTooLarge):
        decode(png(12, 17, 8, 0, rows(ramp("u1", (17, 12)))), limits)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (7, 300), (300, 7), (0, 8), (2**31, 2**31)])
def test_png_with_invalid_sides_is_rejected(width: int, height: int) -> None:
    with pytest.raises(ScanError, match=f"{width} x {height}"):
        decode(png(width, height, 8, 0, bytes(100)))


def test_damaged_png_is_rejected() -> None:
    whole = png(12, 16, 8, 0, rows(ramp("u1")))
    flipped = bytearray(whole)
    flipped[50] ^= 1
    for content in (
        whole[:30],
        whole[:-13],
        whole[:60],
        bytes(flipped),
        whole[:8],
        b"\x89PNG\r\n\x1a\n" + whole,
    ):
        with pytest.raises(DamagedScan, match="PNG"):
            decode(content)
    with pytest.raises(DamagedScan, match="announces 12 x 160"):
        decode(png(12, 160, 8, 0, rows(ramp("u1"))))
    with pytest.raises(DamagedScan, match="found more"):
        decode(png(12, 9, 8, 0, rows(ramp("u1"))))


def test_animated_png_is_rejected() -> None:
    control = (b"acTL", struct.pack(">II", 2, 0))
    with pytest.raises(UnsupportedScan, match="animation"):
        decode(png(12, 16, 8, 0, rows(ramp("u1")), control))


@pytest.mark.parametrize("order", ["<", ">"])
def test_png_with_rotating_exif_orientation_is_rejected(order: str) -> None:
    def turned(orientation: int) -> tuple[bytes, bytes]:
        mark = b"II*\0" if order == "<" else b"MM\0*"
        tags = ((271, 2, 4, 0), (274, 3, 1, orientation << (0 if order == "<" else 16)))
        entries = b"".join(struct.pack(f"{order}HHII", *tag) for tag in tags)
        return b"eXIf", mark + struct.pack(f"{order}IH", 8, len(tags)) + entries

    pixels = rows(ramp("u1"))
    with pytest.raises(UnsupportedScan, match=r"rotated \(EXIF orientation 6\); save it upright"):
        decode(png(12, 16, 8, 0, pixels, turned(6)))
    for upright in (
        turned(1),
        (b"eXIf", turned(6)[1][:-3]),
        (b"eXIf", b"II*\0\xff\xff\xff\xff"),
        (b"eXIf", b""),
    ):
        assert np.array_equal(decode(png(12, 16, 8, 0, pixels, upright)).voxels[..., 0], ramp("u1"))


def test_png_with_exif_orientation_from_pillow_is_rejected() -> None:
    exif = Image.Exif()
    exif[274] = 8
    with pytest.raises(UnsupportedScan, match="EXIF orientation 8"):
        decode(saved(Image.fromarray(ramp("u1")), "PNG", exif=exif))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "f4"])
def test_grey_tiff_of_every_type_and_byte_order_keeps_its_values(dtype: str, order: str) -> None:
    pixels = ramp("i8")
    if dtype[0] != "u":
        pixels -= 120
    pixels = pixels.clip(-128, 127) if dtype == "i1" else pixels
    if dtype == "u4":
        pixels = pixels + 3_000_000_000
    scan = decode(tiff(pixels.astype(dtype), order))
    assert scan.format == "tiff"
    np.testing.assert_array_equal(scan.voxels[..., 0], pixels)


@pytest.mark.parametrize("order", ["<", ">"])
def test_rgb_tiff_keeps_its_values(order: str) -> None:
    rgb = ramp("u1", (16, 12, 3))
    np.testing.assert_array_equal(decode(tiff(rgb, order)).voxels, rgb)


def test_interlaced_png_keeps_its_values() -> None:
    """The seven Adam7 passes by hand: each holds the pixels that no earlier one had."""
    pixels = ramp("u1", (11, 13))
    passes = [pixels[0::8, 0::8], pixels[0::8, 4::8], pixels[4::8, 0::4], pixels[0::4, 2::4]]
    passes += [pixels[2::4, 0::2], pixels[0::2, 1::2], pixels[1::2, :]]
    content = bytearray(png(13, 11, 8, 0, b"".join(rows(part) for part in passes)))
    content[28] = 1  # the header's interlace method
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    np.testing.assert_array_equal(decode(bytes(content)).voxels[..., 0], pixels)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits"])
@pytest.mark.parametrize("dtype", ["u1", "u2", "f4"])
def test_losslessly_compressed_tiff_keeps_its_values(compression: str, dtype: str) -> None:
    pixels = ramp(dtype, (40, 33))
    content = saved(Image.fromarray(pixels), "TIFF", compression=compression)
    np.testing.assert_array_equal(decode(content).voxels[..., 0], pixels)


def test_unsupported_tiff_variant_is_rejected() -> None:
    image = Image.fromarray(ramp("u1"))
    with pytest.raises(UnsupportedScan, match="several"):
        decode(saved(image, "TIFF", save_all=True, append_images=[image]))
    with pytest.raises(UnsupportedScan, match="without loss"):
        decode(saved(image, "TIFF", compression="jpeg"))
    with pytest.raises(UnsupportedScan, match="rotated"):
        decode(tiff(ramp("u1"), t274=6))
    with pytest.raises(UnsupportedScan, match="white is zero"):
        decode(tiff(ramp("u2"), t262=0))
    with pytest.raises(UnsupportedScan, match="CMYK"):
        decode(saved(image.convert("CMYK"), "TIFF"))


@pytest.mark.parametrize(
    ("dtype", "tags", "found"),
    [
        ("f8", {}, "64-bit floats"),
        ("f2", {}, "16-bit floats"),
        ("u8", {}, "64-bit integers"),
        ("i8", {}, "64-bit signed integers"),
        ("u8", {"t339": 6}, "64-bit complex numbers"),
        ("u1", {"t339": 9}, "8-bit sample format 9"),
    ],
)
def test_tiff_of_another_number_type_is_rejected_by_its_name(
    dtype: str, tags: dict[str, int], found: str
) -> None:
    with pytest.raises(UnsupportedScan, match=f"expected .*32-bit floats, found {found}"):
        decode(tiff(ramp(dtype), **tags))


def test_error_of_an_image_that_pillow_does_not_know_has_no_address() -> None:
    with pytest.raises(DamagedScan, match="cannot be decoded") as caught:
        decode(tiff(ramp("u1"), t258=7))
    assert "0x" not in str(caught.value)


def test_damaged_tiff_is_rejected() -> None:
    whole = tiff(ramp("u2"))
    for content in (whole[:4], whole[:9], whole[:-20], whole[:200]):
        with pytest.raises(DamagedScan, match="TIFF"):
            decode(content)
    for tags, reason in (
        ({"t279": 10**9}, "beyond the end"),
        ({"t273": 10**9}, "beyond the end"),
        ({"t273": 4}, "found one at 4"),
        ({"t279": 300}, "found 300"),
        ({"t257": 400}, "need 25 strips"),
        ({"t257": 400, "t278": 400}, "found 384"),
        ({"t322": 60000, "t323": 60000, "t324": 8, "t325": 64}, "tiles"),
        ({"t273": tuple(range(70000))}, "70000 values"),
    ):
        with pytest.raises(DamagedScan, match=reason):
            decode(tiff(ramp("u2"), **tags))


def test_tiff_with_many_large_tags_is_read_in_bounded_memory() -> None:
    """Pillow keeps the content of every tag: 500 tags of the whole file would be 500 copies of it."""
    pixels = np.zeros((512, 512), np.uint8)
    base = tiff(pixels)
    (start,) = struct.unpack_from("<I", base, 4)
    (count,) = struct.unpack_from("<H", base, start)
    entries = base[start + 2 : start + 2 + 12 * count]
    for tag in range(40000, 40480):
        entries += struct.pack("<HHII", tag, 7, 200_000, 8)
    directory = struct.pack("<H", count + 480) + entries + struct.pack("<I", 0)
    content = base[:4] + struct.pack("<I", len(base)) + base[8:] + directory
    tracemalloc.start()
    np.testing.assert_array_equal(decode(content).voxels[..., 0], pixels)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (b"", "0 bytes"),
        (bytes(1000), "not known"),
        (b"\xff\xd8\xff\xe0" + bytes(100), "JPEG"),
        (b"PK\x03\x04" + bytes(100), "ZIP archive without its end"),
        (dicom_files.zipped({"a.txt": b"a"}), "ZIP archive without DICOM"),
        (dicom_files.zipped({"a.dcm": dicom_files.image(ramp("u1"))})[:-30], "without its end"),
        (b"NRRD0009\n", "NRRD"),
        (b"II+\0" + bytes(100), "BigTIFF"),
        (bytes(128) + b"DICM" + bytes(100), "DICOM"),
        (b"II*\0" + bytes(124) + b"DICM" + bytes(100), "DICOM"),
        (b"\x08\0\x05\0CS" + bytes(100), "DICOM without its file header"),
        (b"../../etc/passwd", "not known"),
    ],
)
def test_unknown_content_is_rejected_with_advice(content: bytes, advice: str) -> None:
    with pytest.raises(ScanError, match=advice):
        decode(content)


def test_png_mask_round_trip_keeps_values_for_any_memory_order() -> None:
    labels = ramp("u1") % 5
    content = encode_png(labels)
    assert content == encode_png(np.asfortranarray(labels))
    assert Image.open(io.BytesIO(content)).mode == "L"
    np.testing.assert_array_equal(decode(content).voxels[..., 0], labels)
