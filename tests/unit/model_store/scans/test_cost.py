"""Cost of hostile scans, counted in bytes passed to zlib, which it may have to copy."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom.uid import CTImageStorage, DeflatedExplicitVRLittleEndian

from model_store.errors import DamagedScan
from model_store.scan import decode
from model_store.scans.inflate import BoundedGunzip
from tests.helpers.model_store.dicom_files import header, written
from tests.helpers.model_store.scan_files import nifti1, png, tiff

_EMPTY = gzip.compress(b"")


class Handed:
    """Counts calls to zlib and the bytes passed to it; fails above `most_calls`, so that a loop ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_calls: int) -> None:
        self.calls, self.bytes = 0, 0
        real = zlib.decompressobj
        counter = self

        class Counting:
            def __init__(self, *arguments: int) -> None:
                self._stream = real(*arguments)

            def decompress(self, source: bytes, at_most: int) -> bytes:
                counter.calls += 1
                counter.bytes += len(source)
                assert counter.calls <= most_calls
                return self._stream.decompress(source, at_most)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._stream, name)

        monkeypatch.setattr(zlib, "decompressobj", Counting)


def inflated(data: bytes, requests: Sequence[int]) -> bytes:
    """All content, read in these amounts in turn until it ends."""
    stream, found = BoundedGunzip(data), b""
    while True:
        for request in requests:
            part = bytearray(request)
            written = stream.read_into(memoryview(part))
            found += part[:written]
            if written < request:
                return found


def members(content: bytes, each: int) -> bytes:
    return b"".join(gzip.compress(content[i : i + each]) for i in range(0, len(content), each))


# ---------------------------------------------------------------------------------------------------- gzip


def test_gzip_work_is_linear_in_the_number_of_tiny_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed = Handed(monkeypatch, 10**6)
    costs = []
    for side in (160, 320):
        content = nifti1(np.arange(64 * side, dtype=np.int64).astype(np.uint8).reshape(8, 8, side))
        before = handed.bytes
        decode(members(content, 1))
        costs.append(handed.bytes - before)
    assert costs[1] < 2.2 * costs[0]


def test_gzip_with_a_long_run_of_empty_members_is_rejected() -> None:
    content = nifti1(np.ones((8, 8, 8), np.uint8))
    whole = gzip.compress(content)
    for bomb in (
        _EMPTY * 50_000,
        whole + _EMPTY * 50_000,
        gzip.compress(content[:400]) + _EMPTY * 50_000 + gzip.compress(content[400:]),
    ):
        with pytest.raises(DamagedScan, match="empty ones in a row"):
            decode(bomb)


def test_gzip_with_many_members_is_read() -> None:
    """BGZF: blocks of up to 64 KiB, then an empty one, which stays inside when files are joined."""
    content = nifti1(np.random.default_rng(0).integers(0, 99, (64, 64, 64)).astype(np.int16))
    bgzf = members(content, 65280) + _EMPTY
    joined = members(content[:100_000], 65280) + _EMPTY + members(content[100_000:], 65280) + _EMPTY
    for packed in (bgzf, joined, _EMPTY * 500 + bgzf, members(content, 1_000), joined + bytes(512)):
        np.testing.assert_array_equal(decode(packed).voxels, decode(content).voxels)


def test_gunzip_reads_consecutive_highly_compressed_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this case zlib reports the bytes after the member twice: as unused and as not yet consumed."""
    content = bytes(3 * 2**20) + bytes(range(256)) * 100 + bytes(2 * 2**20)
    packed = members(content, 3 * 2**20 // 2)
    Handed(monkeypatch, 1000)
    assert inflated(packed, [2**21]) == content
    assert inflated(packed + bytes(512), [540, 2**20, 7]) == content


def random_bytes(kib: int) -> bytes:
    return np.random.default_rng(kib).bytes(1024 * kib)


@given(
    parts=st.lists(
        st.one_of(
            st.binary(max_size=300), st.integers(0, 40_000).map(bytes), st.integers(0, 40).map(random_bytes)
        ),
        min_size=1,
        max_size=6,
    ),
    level=st.sampled_from([0, 1, 9]),
    requests=st.lists(st.integers(1, 50_000), min_size=1, max_size=4),
    padding=st.sampled_from([b"", b"\0", bytes(600)]),
)
@settings(max_examples=60, deadline=None)
def test_gunzip_in_any_request_sizes_matches_gzip(
    parts: list[bytes], level: int, requests: list[int], padding: bytes
) -> None:
    packed = b"".join(gzip.compress(part, level) for part in parts)
    assert inflated(packed + padding, requests) == b"".join(parts)
    with pytest.raises(DamagedScan, match="in the middle"):
        inflated(packed[:-1], requests)


# ----------------------------------------------------------------------------------------------------- PNG


def noise(height: int, width: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (height, width), dtype=np.uint8)


def packed_rows(pixels: np.ndarray[Any, Any]) -> bytes:
    return b"".join(b"\0" + row.tobytes() for row in pixels)


def idat(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + b"IDAT" + body + struct.pack(">I", zlib.crc32(b"IDAT" + body))


def with_data(pixels: np.ndarray[Any, Any], chunks: bytes) -> bytes:
    """The PNG of `pixels` with these chunks in place of its data."""
    height, width = pixels.shape
    whole = png(width, height, 8, 0, packed_rows(pixels))
    return whole[:33] + chunks + whole[-12:]


def test_png_with_one_large_chunk_passes_it_to_zlib_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = noise(2400, 2400)
    content = png(2400, 2400, 8, 0, packed_rows(pixels))
    handed = Handed(monkeypatch, 10**6)
    np.testing.assert_array_equal(decode(content).voxels[..., 0], pixels)
    assert handed.bytes < 1.5 * len(content)


def test_png_with_many_chunks_is_read_up_to_the_limit() -> None:
    pixels = noise(40, 30)
    data = zlib.compress(packed_rows(pixels))
    small = b"".join(idat(data[i : i + 1]) + idat(b"") for i in range(len(data)))
    np.testing.assert_array_equal(decode(with_data(pixels, small)).voxels[..., 0], pixels)
    with pytest.raises(DamagedScan, match="at most 65536 chunks"):
        decode(with_data(pixels, idat(data) + idat(b"") * 65536))


@pytest.mark.parametrize("side", [40, 1500])
@pytest.mark.parametrize("surplus", [1, 40, 200_000])
@pytest.mark.parametrize("apart", [False, True])
def test_png_with_data_after_the_pixels_is_rejected(
    side: int, surplus: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A black image deflates to less than one slice of input, so zlib ends with input left over."""
    pixels = np.zeros((side, side), np.uint8)
    data, more = zlib.compress(packed_rows(pixels)), bytes(surplus)
    Handed(monkeypatch, 20)
    with pytest.raises(DamagedScan, match="found more"):
        decode(with_data(pixels, idat(data) + idat(more) if apart else idat(data + more)))


# --------------------------------------------------------------------------------------------------- DICOM


def test_deflated_dicom_is_passed_to_zlib_about_once_for_each_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = header(noise(2400, 2400), CTImageStorage)
    dataset.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    content = written(dataset)
    handed = Handed(monkeypatch, 10**6)
    np.testing.assert_array_equal(decode(content).voxels[..., 0], noise(2400, 2400))
    # The header is read first, and then the pixels.
    assert handed.bytes < 2.2 * len(content)


# ---------------------------------------------------------------------------------------------------- TIFF


def pack_bits(pixels: np.ndarray[Any, Any], backwards: bool) -> dict[str, Any]:
    """Pixels [H, W] as `tiff` takes them, PackBits with a row a strip; `backwards` is FillOrder 2."""
    height, width = pixels.shape
    rows = np.hstack([np.full((height, 1), width - 1, np.uint8), pixels])
    if backwards:
        rows = np.packbits(np.unpackbits(rows[..., None], axis=-1)[..., ::-1], axis=-1)[..., 0]
    starts = tuple(8 + (width + 1) * row for row in range(height))
    tags = {"t256": width, "t257": height, "t259": 32773, "t266": 2 if backwards else 1, "t278": 1}
    return {"pixels": rows, **tags, "t273": starts, "t279": (width + 1,) * height}


@pytest.mark.parametrize("backwards", [False, True])
def test_tiff_with_overlapping_strips_is_rejected(backwards: bool) -> None:
    """With FillOrder 2 each strip would be copied whole, however little of it is used."""
    pixels = noise(64, 50)
    honest = pack_bits(pixels, backwards)
    np.testing.assert_array_equal(decode(tiff(**honest)).voxels[..., 0], pixels)
    shared = {"t273": (8,) * 64, "t279": (64 * 51,) * 64}
    with pytest.raises(DamagedScan, match="do not overlap"):
        decode(tiff(**{**honest, **shared}))
    # With the tags of tiles, which a decoder uses as those of strips.
    with pytest.raises(DamagedScan, match="strips or tiles, found both"):
        decode(tiff(**honest, t324=shared["t273"], t325=shared["t279"]))
