"""PNG: its chunks are read and judged here, its pixels are decoded by Pillow."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from model_store.errors import DamagedScan, UnsupportedScan
from model_store.scans.pixels import decode_pixels
from model_store.scans.types import Limits, Scan, check_sides

SIGNATURE = b"\x89PNG\r\n\x1a\n"

# Text, colour profiles and EXIF are where a decoder meets compressed bombs, and they say nothing about
# intensities: Pillow only gets to see what makes up the pixels.
_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")


def read_png(data: bytes, limits: Limits) -> Scan:
    """Read a PNG of 1 to 16 bits. A grey sample keeps its value: 0…65535 at 16 bits, 0 and 1 at one bit.

    Raises DamagedScan, UnsupportedScan, ScanTooLarge.
    """
    kept: list[bytes | memoryview] = [SIGNATURE]
    notes: list[str] = []
    for kind, body, whole in _chunks(data):
        if len(kept) == 1:
            notes += _check_header(kind, body, limits)
        if kind == b"acTL":
            raise UnsupportedScan("PNG: expected one image, found an animation; send one frame")
        if kind in _KEPT:
            kept.append(whole)
    return decode_pixels(b"".join(kept), "png", tuple(notes))


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview, memoryview]]:
    """(type, body, whole chunk) up to IEND, each with its CRC checked: Pillow does not check that of IDAT."""
    view = memoryview(data)
    position = len(SIGNATURE)
    while True:
        if position + 12 > len(view):
            raise DamagedScan("PNG: the file ends before its last chunk (IEND); send the whole file")
        length, kind = struct.unpack(">I4s", view[position : position + 8])
        end = position + 12 + length
        if end > len(view):
            raise DamagedScan(
                f"PNG: the file ends within its chunk {_printable(kind)} of {length} bytes; send all of it"
            )
        (expected,) = struct.unpack(">I", view[end - 4 : end])
        if zlib.crc32(view[position + 4 : end - 4]) != expected:
            raise DamagedScan(
                f"PNG: chunk {_printable(kind)} is damaged (its CRC differs); send the file again"
            )
        yield kind, view[position + 8 : end - 4], view[position:end]
        if kind == b"IEND":
            return
        position = end


def _check_header(kind: bytes, body: memoryview, limits: Limits) -> list[str]:
    if kind != b"IHDR" or len(body) != 13:
        raise DamagedScan(
            f"PNG: expected the header IHDR first, found {_printable(kind)}; send the file again"
        )
    width, height, bits, colour = struct.unpack(">IIBB", body[:10])
    check_sides(width, height, limits, "PNG")
    if bits == 16 and colour != 0:
        return ["16 bits per colour are read as 8; only grey images keep 16"]
    return []


def _printable(kind: bytes) -> str:
    return kind.decode("ascii", "backslashreplace")
