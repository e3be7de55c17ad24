"""NRRD of one file (.nrrd, .seg.nrrd), raw or gzip: bytes to a Scan.

    http://teem.sourceforge.net/nrrd/format.html

Voxels in another file are refused: a file names no path here.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

import numpy as np

from model_store.errors import DamagedScan, UnsupportedScan
from model_store.scans.raster import ORIENTATION_UNKNOWN, UNITS, Raster, Triple, numbers, wholes
from model_store.scans.types import Limits, Note, Scan, Segment

SIGNATURES: Final = tuple(f"NRRD000{version}".encode() for version in range(1, 6))
_NAME: Final = "NRRD"
_LONGEST_HEADER = 2**20
_COMPRESSION = 1
_TYPES: Final = {
    **dict.fromkeys(("signed char", "int8", "int8_t"), "i1"),
    **dict.fromkeys(("uchar", "unsigned char", "uint8", "uint8_t"), "u1"),
    **dict.fromkeys(("short", "short int", "signed short", "signed short int", "int16", "int16_t"), "i2"),
    **dict.fromkeys(("ushort", "unsigned short", "unsigned short int", "uint16", "uint16_t"), "u2"),
    **dict.fromkeys(("int", "signed int", "int32", "int32_t"), "i4"),
    **dict.fromkeys(("uint", "unsigned int", "uint32", "uint32_t"), "u4"),
    **dict.fromkeys(
        (
            "longlong",
            "long long",
            "long long int",
            "signed long long",
            "signed long long int",
            "int64",
            "int64_t",
        ),
        "i8",
    ),
    **dict.fromkeys(
        ("ulonglong", "unsigned long long", "unsigned long long int", "uint64", "uint64_t"), "u8"
    ),
    "float": "f4",
    "double": "f8",
}
# Factors from a space to LPS. Others have no patient: ITK takes their axes for LPS.
_SPACES: Final[Mapping[str, Triple]] = {
    **dict.fromkeys(("left-posterior-superior", "lps"), (1.0, 1.0, 1.0)),
    **dict.fromkeys(("right-anterior-superior", "ras"), (-1.0, -1.0, 1.0)),
    **dict.fromkeys(("left-anterior-superior", "las"), (1.0, -1.0, 1.0)),
}
_SPATIAL: Final = ("domain", "space")
_COLOURS: Final = ("rgb-color", "3-color", "rgba-color", "4-color")
# Fields by which the voxels are in other files.
_DETACHED: Final = ("data file", "datafile")
_HALF = re.compile(rb"^data ?file:(?!=)", re.MULTILINE | re.IGNORECASE)
_SEGMENT = re.compile(r"^Segment(\d+)_(Name|LabelValue|Tags):=(.*)$", re.MULTILINE)
# A terminology entry has context~category~type~…, each of them scheme^value^meaning.
_TYPE = re.compile(r"TerminologyEntry:[^|~]*~[^|~]*~([^|~^]*)\^([^|~^]*)\^")
_VECTOR = re.compile(r"none|\([^()]*\)", re.IGNORECASE)


def is_half(head: bytes) -> bool:
    """Whether a file's first bytes are a header (.nhdr) with its voxels in another file."""
    return head.startswith(SIGNATURES) and _HALF.search(head.partition(b"\n\n")[0]) is not None


def read_nrrd(data: bytes, limits: Limits) -> Scan:
    """Read a .nrrd; of a .seg.nrrd, what it says of its segments too.

    Raises DamagedScan, UnsupportedScan, ScanTooLarge.
    """
    return replace(_raster(data).scan(data, limits, "nrrd"), segments=_segments(data))


def deidentify_nrrd(data: bytes, limits: Limits, _key: bytes) -> bytes:
    """Write the header newly, with what is read alone, and compress without a file's name and time.

    Raises as `read_nrrd`.
    """
    raster = _raster(data)
    raster.check(limits)
    content = bytes(raster.array(data))
    many = raster.channels > 1
    channel = ("RGB-color" if raster.channels == 3 else "RGBA-color") if raster.colours else "list"
    vectors = [f"({','.join(map(repr, column))})" for column in raster.columns]
    axes = [(str(side), vector, "domain") for side, vector in zip(raster.shape, vectors, strict=True)]
    if many:
        axes.insert(0 if raster.inner else 3, (str(raster.channels), "none", channel))
    known = ORIENTATION_UNKNOWN not in raster.notes
    unit = next(name for name, mm in UNITS.items() if mm == raster.mm_per_unit and name)
    lines = (
        "NRRD0005",
        f"type: {next(name for name, code in _TYPES.items() if code == raster.dtype.str[1:])}",
        f"dimension: {len(axes)}",
        "space: left-posterior-superior" if known else "space dimension: 3",
        f"sizes: {' '.join(size for size, _, _ in axes)}",
        f"space directions: {' '.join(vector for _, vector, _ in axes)}",
        f"kinds: {' '.join(kind for _, _, kind in axes)}",
        f"endian: {'big' if raster.dtype.str.startswith('>') else 'little'}",
        f"encoding: {'raw' if raster.packed is None else 'gzip'}",
        f'space units: "{unit}" "{unit}" "{unit}"',
        f"space origin: ({','.join(map(repr, raster.origin))})",
    )
    body = content if raster.packed is None else gzip.compress(content, _COMPRESSION, mtime=0)
    return "\n".join(lines).encode() + b"\n\n" + body


def _raster(data: bytes) -> Raster:
    fields, offset = _header(data)

    def needed(name: str) -> str:
        if name not in fields:
            raise DamagedScan(f"{_NAME}: expected the field `{name}`, found none; send the whole file")
        return fields[name]

    if any(name in fields for name in _DETACHED):
        raise UnsupportedScan(
            f"{_NAME}: expected the voxels in the same file (.nrrd), found them in another (.nhdr); save it "
            "as one file, or as NIfTI (3D Slicer does)"
        )
    (dimension,) = wholes(_NAME, "dimension", needed("dimension"), 1, 1)
    if dimension not in (3, 4):
        raise UnsupportedScan(
            f"{_NAME}: expected a volume of 3 dimensions, found {dimension}; save an image as PNG or TIFF"
        )
    sizes = wholes(_NAME, "sizes", needed("sizes"), dimension, dimension)
    kinds = fields.get("kinds", "").lower().split()
    vectors = _VECTOR.findall(fields.get("space directions", "").lower())
    axis = _channel_axis(dimension, kinds, vectors)
    spatial = [index for index in range(dimension) if index != axis]
    i, j, k = (sizes[index] for index in spatial)
    code = _TYPES.get(needed("type").lower())
    if code is None:
        raise UnsupportedScan(
            f"{_NAME}: expected integer or float voxels, found type {fields['type'][:32]!r}; convert it, for "
            "example to int16 or float32"
        )
    order = ">" if fields.get("endian", "little").lower() == "big" else "<"
    channels = 1 if axis is None else sizes[axis]
    kind = kinds[axis] if axis is not None and axis < len(kinds) else ""
    _check_skips(fields)
    columns, origin, mm, notes = _position(fields, vectors, spatial)
    return Raster(
        name=_NAME,
        shape=(i, j, k),
        channels=channels,
        inner=axis == 0,
        colours=kind in _COLOURS and channels in (3, 4) and code == "u1",
        dtype=np.dtype(order + code),
        columns=columns,
        origin=origin,
        offset=offset,
        packed=_packed(needed("encoding")),
        mm_per_unit=mm,
        notes=notes,
    )


def _header(data: bytes) -> tuple[dict[str, str], int]:
    """The fields by their names in lower case, without keys of programs, and where the data begin."""
    ends = [(data.find(end, 0, _LONGEST_HEADER), len(end)) for end in (b"\n\n", b"\r\n\r\n")]
    found = min((each for each in ends if each[0] >= 0), default=None)
    if found is None and is_half(data[:_LONGEST_HEADER]):
        # A header by itself need not end with an empty line.
        found = len(data), 0
    if found is None:
        raise DamagedScan(
            f"{_NAME}: expected an empty line after the header, found none; send the whole file"
        )
    end, length = found
    fields: dict[str, str] = {}
    for line in data[:end].decode("utf-8", "replace").splitlines()[1:]:
        name, colon, value = line.partition(":")
        # `#` begins a comment, and `key:=value` is a program's own.
        if not colon or line.startswith("#") or value.startswith("="):
            continue
        name = " ".join(name.lower().split())
        if name in fields:
            raise DamagedScan(
                f"{_NAME}: expected each field once, found `{name[:32]}` twice; correct the header"
            )
        fields[name] = value.strip()
    return fields, end + length


def _segments(data: bytes) -> dict[int, Segment]:
    """What 3D Slicer says of the segments, by the value of each."""
    head = data[: max(data.find(b"\n\n", 0, _LONGEST_HEADER), 0)].decode("utf-8", "replace")
    own: dict[str, dict[str, str]] = {}
    for number, key, value in _SEGMENT.findall(head):
        own.setdefault(number, {})[key] = value.strip()
    found: dict[int, Segment] = {}
    for said in own.values():
        if not said.get("LabelValue", "").isdecimal():
            continue
        coded = _TYPE.search(said.get("Tags", ""))
        scheme, code = coded.groups() if coded else ("", "")
        found[int(said["LabelValue"])] = Segment.of(said.get("Name"), code, scheme)
    return found


def _channel_axis(dimension: int, kinds: list[str], vectors: list[str]) -> int | None:
    """The axis that is not of space, None where all three are."""
    if dimension == 3:
        return None
    by_vectors = [index for index, vector in enumerate(vectors) if vector == "none"]
    by_kinds = [index for index, kind in enumerate(kinds) if kind not in _SPATIAL]
    found = by_vectors if len(vectors) == dimension else by_kinds
    if len(found) != 1 or found[0] not in (0, dimension - 1):
        raise UnsupportedScan(
            f"{_NAME}: expected three axes of space and one of values, the first or the last, found kinds "
            f"{' '.join(kinds)[:64] or 'none'}; save one volume"
        )
    return found[0]


def _position(
    fields: Mapping[str, str], vectors: list[str], spatial: list[int]
) -> tuple[tuple[Triple, Triple, Triple], Triple, float, tuple[Note, ...]]:
    """Columns and origin in LPS, millimetres per unit, and notes."""
    factors = _SPACES.get(fields.get("space", "").lower())
    notes: tuple[Note, ...] = () if factors is not None and vectors else (ORIENTATION_UNKNOWN,)
    x, y, z = factors or (1.0, 1.0, 1.0)

    def turned(text: str, field: str) -> Triple:
        one, two, three = numbers(_NAME, field, text.strip("()"), 3)
        return x * one + 0.0, y * two + 0.0, z * three + 0.0

    if vectors:
        own = [vector for vector in vectors if vector != "none"]
        if len(own) != 3:
            raise DamagedScan(
                f"{_NAME}: space directions: expected three vectors, found {len(own)}; correct the header"
            )
        first, second, third = (turned(vector, "space directions") for vector in own)
    else:
        parts = fields.get("spacings", "").split()
        sizes = [parts[index] if index < len(parts) else "1" for index in spatial]
        a, b, c = numbers(_NAME, "spacings", " ".join(sizes), 3)
        first, second, third = (a, 0.0, 0.0), (0.0, b, 0.0), (0.0, 0.0, c)
    origin = turned(fields["space origin"], "space origin") if "space origin" in fields else (0.0, 0.0, 0.0)
    units = {unit.strip().lower() for unit in re.findall(r'"([^"]*)"', fields.get("space units", ""))} or {""}
    if len(units) != 1 or not units <= UNITS.keys():
        raise UnsupportedScan(
            f"{_NAME}: space units: expected one of {', '.join(filter(None, UNITS))} for all axes, found "
            "another; correct the header"
        )
    return (first, second, third), origin, UNITS[units.pop()], notes


def _check_skips(fields: Mapping[str, str]) -> None:
    if any(fields.get(name, "0") != "0" for name in ("line skip", "lineskip", "byte skip", "byteskip")):
        raise UnsupportedScan(
            f"{_NAME}: expected the voxels right behind the header, found that lines or bytes are skipped; "
            "save it again"
        )


def _packed(encoding: str) -> Literal["gzip"] | None:
    if encoding.lower() in ("gzip", "gz"):
        return "gzip"
    if encoding.lower() == "raw":
        return None
    raise UnsupportedScan(
        f"{_NAME}: expected encoding raw or gzip, found {encoding[:16]!r}; save it again with one of them"
    )
