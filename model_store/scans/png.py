"""PNG: the chunks are read and checked here, the pixels are decoded by Pillow."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from model_store.errors import DamagedScan, UnsupportedScan
from model_store.scans.inflate import inflated
from model_store.scans.pixels import decode_pixels
from model_store.scans.types import EIGHT_BITS, Limits, Scan, check_sides

SIGNATURE = b"\x89PNG\r\n\x1a\n"

# Pillow gets only the chunks that make up the pixels. Text, colour profiles and EXIF may hold decompression
# bombs and do not affect intensities. The orientation in EXIF is checked here.
_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")

_PALETTE = 3
# Colour type -> samples per pixel.
_SAMPLES = {0: 1, 2: 3, _PALETTE: 1, 4: 2, 6: 4}

# The passes of an image, plain and interlaced (Adam7): first column and row, steps between columns and rows.
_PLAIN = ((0, 0, 1, 1),)
_ADAM7 = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)),
    (0, 1, 1, 2),
)
# A colour image of 4096 x 4096 in the small chunks that encoders write has a fifth of this number. Even an
# empty chunk costs some hundred bytes of memory.
_MOST_CHUNKS = 65536

_ORIENTATION, _MOST_TAGS = 274, 512
_TURNED = range(2, 9)


@dataclass(frozen=True)
class _Header:
    width: int
    height: int
    bits: int
    colour: int
    interlaced: bool

    @property
    def data_bytes(self) -> int:
        """Size of the decompressed pixels: a filter byte and the packed samples of each row of each pass."""
        total = 0
        for x, y, dx, dy in _ADAM7 if self.interlaced else _PLAIN:
            columns, rows = -(-(self.width - x) // dx), -(-(self.height - y) // dy)
            if columns > 0 and rows > 0:
                total += rows * (1 + -(-columns * self.bits * _SAMPLES[self.colour] // 8))
        return total


def read_png(data: bytes, limits: Limits, *, indexed: bool = False) -> Scan:
    """Read a PNG of 1 to 16 bits. A grey sample keeps its value: 0…65535 at 16 bits, 0…3 at two.

    `indexed` is that of `decode_pixels`.

    Raises DamagedScan, UnsupportedScan, ScanTooLarge.
    """
    chunks = _chunks(data)
    kind, body, whole = next(chunks)
    header = _header(kind, body)
    check_sides(header.width, header.height, limits, "PNG")
    kept: list[bytes | memoryview] = [SIGNATURE, whole]
    packed: list[memoryview] = []
    has_palette = False
    for kind, body, whole in chunks:
        if kind == b"acTL":
            raise UnsupportedScan("PNG: expected one image, found an animation; send one frame")
        if kind == b"eXIf":
            _check_upright(body)
        if kind in _KEPT:
            kept.append(whole)
        if kind == b"PLTE":
            has_palette = True
        if kind == b"IDAT":
            packed.append(body)
    if header.colour == _PALETTE and not has_palette:
        raise DamagedScan("PNG: expected the palette of its colours, found none; save it again")
    _check_amount(header, packed)
    notes = (EIGHT_BITS,) if header.bits == 16 and header.colour != 0 else ()
    bits = 8 if header.colour else header.bits
    return decode_pixels(b"".join(kept), "png", notes, grey_bits=bits, indexed=indexed)


def deidentify_png(data: bytes, _limits: Limits, _key: bytes) -> bytes:
    """Keep the chunks of the pixels: no text, no time, no EXIF, and nothing after the last chunk.

    For a file that `read_png` has read.
    """
    return b"".join([SIGNATURE, *(whole for kind, _, whole in _chunks(data) if kind in _KEPT)])


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview, memoryview]]:
    """(type, body, whole chunk) up to IEND. All CRCs are checked here: Pillow does not check that of IDAT."""
    view = memoryview(data)
    position = len(SIGNATURE)
    for _ in range(_MOST_CHUNKS):
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
    raise DamagedScan(f"PNG: expected at most {_MOST_CHUNKS} chunks, found more; save the image again")


def _header(kind: bytes, body: memoryview) -> _Header:
    if kind != b"IHDR" or len(body) != 13:
        raise DamagedScan(
            f"PNG: expected the header IHDR first, found {_printable(kind)}; send the file again"
        )
    width, height, bits, colour, _, _, interlace = struct.unpack(">IIBBBBB", body)
    if colour not in _SAMPLES or bits not in (1, 2, 4, 8, 16) or interlace > 1:
        raise DamagedScan(
            f"PNG: its header has {bits} bits, colour type {colour}, interlacing {interlace}, "
            "which no PNG has; send the file again"
        )
    return _Header(width, height, bits, colour, bool(interlace))


def _check_upright(exif: memoryview) -> None:
    """Reject an image that viewers rotate: a mask drawn in a viewer would not fit the stored pixels.

    Viewers ignore EXIF that cannot be read, and so does this function.
    """
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(exif[:4]))
    if order is None:
        return
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        for number in range(min(count, _MOST_TAGS)):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", exif, start + 2 + 12 * number)
            if tag == _ORIENTATION and value in _TURNED:
                raise UnsupportedScan(
                    f"PNG: the image is stored rotated (EXIF orientation {value}); save it upright"
                )
    except struct.error:
        return


def _check_amount(header: _Header, packed: list[memoryview]) -> None:
    """Reject more or fewer pixels than the header announces.

    Pillow leaves missing rows black, and does not report data after the last row.
    """
    expected, found = header.data_bytes, 0
    stream = zlib.decompressobj()
    try:
        for part in inflated(stream, packed):
            found += len(part)
            if found > expected:
                break
    except zlib.error as error:
        raise DamagedScan(f"PNG: the compressed pixels are damaged ({error}); send the file again") from error
    if found != expected or not stream.eof or stream.unused_data:
        raise DamagedScan(
            f"PNG: the header announces {header.width} x {header.height} pixels ({expected} bytes), "
            f"found {'more' if found >= expected else f'{found} bytes'}; send the whole file"
        )


def _printable(kind: bytes) -> str:
    return kind.decode("ascii", "backslashreplace")
