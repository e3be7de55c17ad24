"""TIFF: the directory is read and rewritten here, the pixels are decoded by Pillow.

A TIFF's directory may point anywhere, any number of times: tens of thousands of entries may each refer to the
whole file, and directories may be nested. So the entries that make up the pixels are checked one by one and
written to a new directory at the end of the file. Pillow sees only these.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from model_store.errors import DamagedScan, UnsupportedScan
from model_store.scans.pixels import decode_pixels
from model_store.scans.types import EIGHT_BITS, Limits, Scan, check_sides

SIGNATURES = (b"II*\0", b"MM\0*")
BIG_SIGNATURES = (b"II+\0", b"MM\0+")

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER = 256, 257, 258, 259, 262, 266
_OFFSETS, _ORIENTATION, _SAMPLES, _ROWS, _COUNTS, _PLANAR = 273, 274, 277, 278, 279, 284
_PREDICTOR, _COLOURS, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS = 317, 320, 322, 323, 324, 325
_EXTRA, _FORMAT = 338, 339
# By SampleFormat: fewest and most bits that are read, and what it is called.
_SAMPLE_BITS = {1: (1, 32), 2: (8, 32), 3: (32, 32), 4: (1, 32)}
_SAMPLE_KINDS = {
    1: "integers",
    2: "signed integers",
    3: "floats",
    5: "complex integers",
    6: "complex numbers",
}
_KEPT = (
    *(_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER, _OFFSETS, _SAMPLES, _ROWS, _COUNTS),
    *(_PLANAR, _PREDICTOR, _COLOURS, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS, _EXTRA, _FORMAT),
)
# Tag type -> struct letter. The kept tags are all whole numbers.
_TYPES = {1: "B", 3: "H", 4: "I"}
_LOSSLESS = {1: "none", 5: "LZW", 8: "deflate", 32946: "deflate", 32773: "PackBits"}
_HEADER_BYTES = 8
_MOST_ENTRIES = 512
_MOST_VALUES = 65536


@dataclass(frozen=True)
class _Entry:
    tag: int
    type: int
    count: int
    raw: bytes  # the four bytes of value or offset
    values: tuple[int, ...]


def read_tiff(data: bytes, limits: Limits, *, indexed: bool = False) -> Scan:
    """Read a one-page TIFF of 1 to 32 bits, integer or float, grey, RGB or palette.

    A grey sample keeps its value. `indexed` is that of `decode_pixels`.

    Raises DamagedScan, UnsupportedScan, ScanTooLarge.
    """
    order = "<" if data[:2] == b"II" else ">"
    entries = _directory(data, order)
    _check(entries, limits)
    _check_amount(entries, len(data))
    bits, sample_format = _first(entries, _BITS, 1), _first(entries, _FORMAT, 1)
    grey = _first(entries, _SAMPLES, 1) == 1
    view: type[np.generic] | None = None
    if grey and (bits, sample_format) == (8, 2):
        view = np.int8
    elif grey and (bits, sample_format) == (32, 1):
        # Pillow's 32-bit mode is signed, and it rejects big-endian unsigned. The bits are reinterpreted.
        view = np.uint32
        one = struct.pack(order + "H2x", 2)
        entries[_FORMAT] = _Entry(_FORMAT, 3, 1, one, (2,))
    notes = (EIGHT_BITS,) if bits == 16 and not grey else ()
    content, grey_bits = _rewrite(data, order, entries), bits if grey else 8
    return decode_pixels(content, "tiff", notes, view, grey_bits=grey_bits, indexed=indexed)


def deidentify_tiff(data: bytes, _limits: Limits, _key: bytes) -> bytes:
    """Keep the strips or tiles, and the tags that decode them: no text, no EXIF, no bytes outside of them.

    For a file that `read_tiff` has read.
    """
    order = "<" if data[:2] == b"II" else ">"
    entries = _directory(data, order)
    offsets, counts = (_TILE_OFFSETS, _TILE_COUNTS) if _TILE_WIDTH in entries else (_OFFSETS, _COUNTS)
    content = bytearray(data[:_HEADER_BYTES])

    def append(piece: bytes) -> int:
        content.extend(bytes(len(content) % 2))
        content.extend(piece)
        return len(content) - len(piece)

    pieces = zip(entries[offsets].values, entries[counts].values, strict=True)
    moved = tuple(append(data[start : start + count]) for start, count in pieces)
    directory = []
    for tag in sorted(tag for tag in _KEPT if tag in entries):
        kind, values = (4, moved) if tag == offsets else (entries[tag].type, entries[tag].values)
        raw = struct.pack(f"{order}{len(values)}{_TYPES[kind]}", *values)
        if len(raw) > 4:
            raw = struct.pack(order + "I", append(raw))
        directory.append(struct.pack(order + "HHI4s", tag, kind, len(values), raw))
    start = append(struct.pack(order + "H", len(directory)) + b"".join(directory) + bytes(4))
    struct.pack_into(order + "I", content, 4, start)
    return bytes(content)


def _directory(data: bytes, order: str) -> dict[int, _Entry]:
    try:
        (start,) = struct.unpack_from(order + "I", data, 4)
        (count,) = struct.unpack_from(order + "H", data, start)
        if count > _MOST_ENTRIES:
            raise DamagedScan(f"TIFF: expected at most {_MOST_ENTRIES} directory entries, found {count}")
        raw = [struct.unpack_from(order + "HHI4s", data, start + 2 + 12 * i) for i in range(count)]
        (following,) = struct.unpack_from(order + "I", data, start + 2 + 12 * count)
    except struct.error as error:
        raise DamagedScan("TIFF: the file ends before its directory; send the whole file") from error
    if following:
        raise UnsupportedScan("TIFF: expected one page, found several; send one page, or the volume as NIfTI")
    return {
        tag: _entry(data, order, tag, kind, number, value)
        for tag, kind, number, value in raw
        if tag in _KEPT or tag == _ORIENTATION
    }


def _entry(data: bytes, order: str, tag: int, kind: int, count: int, raw: bytes) -> _Entry:
    letter = _TYPES.get(kind)
    if letter is None:
        raise DamagedScan(f"TIFF: tag {tag} has type {kind}, expected a whole number; send the file again")
    if not 1 <= count <= _MOST_VALUES:
        raise DamagedScan(f"TIFF: tag {tag} has {count} values, expected 1 to {_MOST_VALUES}; save it again")
    size = struct.calcsize(order + letter) * count
    offset, source = 0, raw
    if size > 4:
        (offset,) = struct.unpack(order + "I", raw)
        source = data
    if offset + size > len(source):
        raise DamagedScan(f"TIFF: tag {tag} points beyond the end of the file; send the whole file")
    return _Entry(tag, kind, count, raw, struct.unpack_from(f"{order}{count}{letter}", source, offset))


def _first(entries: dict[int, _Entry], tag: int, default: int) -> int:
    entry = entries.get(tag)
    return entry.values[0] if entry else default


def _check(entries: dict[int, _Entry], limits: Limits) -> None:
    width, height = _first(entries, _WIDTH, 0), _first(entries, _HEIGHT, 0)
    check_sides(width, height, limits, "TIFF")
    compression = _first(entries, _COMPRESSION, 1)
    if compression not in _LOSSLESS:
        raise UnsupportedScan(
            f"TIFF: expected no compression, LZW, deflate or PackBits, found compression {compression}; "
            "save it without loss"
        )
    if _first(entries, _ORIENTATION, 1) != 1:
        raise UnsupportedScan("TIFF: the image is stored rotated (orientation tag); save it upright")
    if _first(entries, _PHOTOMETRIC, 1) == 0 and _first(entries, _BITS, 1) > 8:
        raise UnsupportedScan("TIFF: white is zero (an inverted image); save it with black as zero")
    bits, sample_format = _first(entries, _BITS, 1), _first(entries, _FORMAT, 1)
    if sample_format not in _SAMPLE_BITS or bits > _SAMPLE_BITS[sample_format][1]:
        kind = _SAMPLE_KINDS.get(sample_format, f"sample format {sample_format}")
        raise UnsupportedScan(
            f"TIFF: expected integers of up to 32 bits or 32-bit floats, found {bits}-bit {kind}; save it "
            "as one of these"
        )
    if bits < _SAMPLE_BITS[sample_format][0]:
        raise UnsupportedScan(f"TIFF: expected 32-bit floats, found {bits}-bit floats; save it as these")
    samples = _first(entries, _SAMPLES, 1)
    if not 1 <= samples <= 4:
        raise UnsupportedScan(
            f"TIFF: expected 1 to 4 samples per pixel, found {samples}; save it as grey or RGB"
        )
    # A decoder allocates whole tiles, even for a small image.
    if _first(entries, _TILE_WIDTH, 1) > max(1024, 2 * width) or (
        _first(entries, _TILE_HEIGHT, 1) > max(1024, 2 * height)
    ):
        raise DamagedScan("TIFF: its tiles are far larger than its image; save it in strips")


def _check_amount(entries: dict[int, _Entry], length: int) -> None:
    """Reject missing, short or misplaced strips or tiles: a decoder may leave their pixels black."""
    width, height = _first(entries, _WIDTH, 0), _first(entries, _HEIGHT, 0)
    strips, tiles = entries.keys() & {_OFFSETS, _COUNTS}, entries.keys() & {_TILE_OFFSETS, _TILE_COUNTS}
    if strips and tiles:
        # A decoder uses the last ones it reads, which need not be the ones that are checked here.
        raise DamagedScan("TIFF: expected strips or tiles, found both; save it again")
    tiled = _TILE_WIDTH in entries
    columns = max(1, _first(entries, _TILE_WIDTH, width))
    rows = _first(entries, _TILE_HEIGHT, height) if tiled else min(_first(entries, _ROWS, height), height)
    rows = max(1, rows)
    offsets = entries.get(_TILE_OFFSETS if tiled else _OFFSETS)
    counts = entries.get(_TILE_COUNTS if tiled else _COUNTS)
    samples = _first(entries, _SAMPLES, 1)
    separate = _first(entries, _PLANAR, 1) == 2
    expected = -(-width // columns) * -(-height // rows) * (samples if separate else 1)
    if offsets is None or counts is None or not (offsets.count == counts.count == expected):
        found = 0 if offsets is None else offsets.count
        raise DamagedScan(
            f"TIFF: {width} x {height} pixels need {expected} strips or tiles with their lengths, "
            f"found {found}; save it again"
        )
    if any(o + c > length for o, c in zip(offsets.values, counts.values, strict=True)):
        raise DamagedScan("TIFF: a strip is beyond the end of the file; send the whole file")
    # The header is rewritten before the pixels are decoded.
    if min(offsets.values) < _HEADER_BYTES:
        raise DamagedScan(
            f"TIFF: expected strips after the header of {_HEADER_BYTES} bytes, found one at "
            f"{min(offsets.values)}; save it again"
        )
    # With reversed bits (FillOrder 2) a decoder copies each strip: strips that share their bytes would cost
    # their number times their size.
    if sum(counts.values) > length:
        raise DamagedScan(
            f"TIFF: expected strips or tiles that do not overlap, found {sum(counts.values)} bytes of them "
            f"in a file of {length}; save it again"
        )
    if _first(entries, _COMPRESSION, 1) == 1:
        per_row = -(-columns * _first(entries, _BITS, 1) * (1 if separate else samples) // 8)
        # The last strip may be shorter than the others; a last tile may not.
        needed = expected * rows * per_row if tiled else height * per_row * (samples if separate else 1)
        if sum(counts.values) < needed:
            raise DamagedScan(
                f"TIFF: {width} x {height} pixels need {needed} bytes, found {sum(counts.values)}; "
                "send the whole file"
            )


def _rewrite(data: bytes, order: str, entries: dict[int, _Entry]) -> bytes:
    """The file with a new directory of the kept entries at its end. All offsets stay valid."""
    kept = [entries[tag] for tag in sorted(_KEPT) if tag in entries]
    padding = b"\0" * (len(data) % 2)
    start = len(data) + len(padding)
    directory = struct.pack(order + "H", len(kept))
    for entry in kept:
        directory += struct.pack(order + "HHI4s", entry.tag, entry.type, entry.count, entry.raw)
    directory += struct.pack(order + "I", 0)
    return b"".join([data[:4], struct.pack(order + "I", start), data[_HEADER_BYTES:], padding, directory])
