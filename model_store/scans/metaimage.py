"""MetaImage of one file (.mha), raw or compressed: bytes to a Scan.

    https://itk.org/Wiki/ITK/MetaIO/Documentation

Voxels in another file (.mhd) are refused: a file names no path here.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Final

import numpy as np

from model_store.errors import DamagedScan, UnsupportedScan
from model_store.scans.raster import ORIENTATION_UNKNOWN, UNITS, Raster, Triple, numbers, wholes
from model_store.scans.types import Limits, Scan

SIGNATURES: Final = (b"ObjectType", b"NDims")
_NAME: Final = "MetaImage"
_LONGEST_HEADER = 2**16
_COMPRESSION = 1
_LAST: Final = "elementdatafile"
_HALF = re.compile(rb"^ElementDataFile *= *(\S+)", re.MULTILINE | re.IGNORECASE)
# Names of one field, the usual one first.
_MATRIX: Final = ("TransformMatrix", "Rotation", "Orientation")
_OFFSET: Final = ("Offset", "Position", "Origin")
_SPACING: Final = ("ElementSpacing", "ElementSize")
_TYPES: Final = {
    "MET_CHAR": "i1",
    "MET_UCHAR": "u1",
    "MET_SHORT": "i2",
    "MET_USHORT": "u2",
    "MET_INT": "i4",
    "MET_UINT": "u4",
    "MET_LONG": "i4",
    "MET_ULONG": "u4",
    "MET_LONG_LONG": "i8",
    "MET_ULONG_LONG": "u8",
    "MET_FLOAT": "f4",
    "MET_DOUBLE": "f8",
}
_MODALITIES: Final = {"MET_MOD_CT": "CT", "MET_MOD_MR": "MR", "MET_MOD_NM": "NM", "MET_MOD_US": "US"}


def is_half(head: bytes) -> bool:
    """Whether a file's first bytes are a header (.mhd) with its voxels in another file."""
    found = _HALF.search(head) if head.startswith(SIGNATURES) else None
    return found is not None and found[1].upper() != b"LOCAL"


def read_metaimage(data: bytes, limits: Limits) -> Scan:
    """Read a .mha. Raises DamagedScan, UnsupportedScan, ScanTooLarge."""
    return _raster(data).scan(data, limits, "metaimage")


def deidentify_metaimage(data: bytes, limits: Limits, _key: bytes) -> bytes:
    """Write the header newly, with what is read alone. Raises as `read_metaimage`."""
    raster = _raster(data)
    raster.check(limits)
    content = bytes(raster.array(data))
    body = content if raster.packed is None else zlib.compress(content, _COMPRESSION)
    sides = [*raster.shape] if raster.inner or raster.channels == 1 else [*raster.shape, raster.channels]
    fields, _ = _header(data)
    count = wholes(_NAME, "NDims", fields["ndims"], 1, 1)[0]
    place = []
    for names, length in ((_MATRIX, count * count), (_OFFSET, count), (_SPACING, count)):
        if (found := _given(fields, names)) is not None:
            given = np.array(numbers(_NAME, names[0], found, length)).reshape((-1, count))
            kept = given[: len(sides) if names is _MATRIX else 1, : len(sides)]
            place.append(f"{names[0]} = {' '.join(map(repr, kept.ravel().tolist()))}")
    modality = next((name for name, short in _MODALITIES.items() if short == raster.modality), None)
    unit = next(name for name, mm in UNITS.items() if mm == raster.mm_per_unit and name)
    lines = (
        "ObjectType = Image",
        f"NDims = {len(sides)}",
        "BinaryData = True",
        f"BinaryDataByteOrderMSB = {raster.dtype.str.startswith('>')}",
        f"CompressedData = {raster.packed is not None}",
        *([] if raster.packed is None else [f"CompressedDataSize = {len(body)}"]),
        *place,
        f"DimSize = {' '.join(map(str, sides))}",
        f"DistanceUnits = {unit}",
        *([] if modality is None else [f"Modality = {modality}"]),
        f"ElementNumberOfChannels = {raster.channels if raster.inner else 1}",
        f"ElementType = {next(name for name, code in _TYPES.items() if code == raster.dtype.str[1:])}",
        "ElementDataFile = LOCAL",
    )
    return "\n".join(lines).encode() + b"\n" + body


def _raster(data: bytes) -> Raster:
    fields, offset = _header(data)

    def needed(name: str) -> str:
        if name.lower() not in fields:
            raise DamagedScan(f"{_NAME}: expected the field {name}, found none; send the whole file")
        return fields[name.lower()]

    if needed("ElementDataFile").upper() != "LOCAL":
        raise UnsupportedScan(
            f"{_NAME}: expected the voxels in the same file (.mha), found them in another (.mhd); save it as "
            "one file, or as NIfTI (3D Slicer does)"
        )
    if not _is_true(fields, "BinaryData", default=True) or fields.get("headersize", "0") != "0":
        raise UnsupportedScan(
            f"{_NAME}: expected binary voxels right behind the header, found others; save it again"
        )
    (dimension,) = wholes(_NAME, "NDims", needed("NDims"), 1, 1)
    if dimension not in (3, 4):
        raise UnsupportedScan(
            f"{_NAME}: expected a volume of 3 dimensions, found {dimension}; save an image as PNG or TIFF"
        )
    i, j, k, *more = wholes(_NAME, "DimSize", needed("DimSize"), dimension, dimension)
    (values,) = wholes(_NAME, "ElementNumberOfChannels", fields.get("elementnumberofchannels", "1"), 1, 1)
    code = _TYPES.get(needed("ElementType").upper())
    if code is None or values < 1 or (values > 1 and more != [] and more != [1]):
        raise UnsupportedScan(
            f"{_NAME}: expected integer or float voxels of one volume, found ElementType "
            f"{fields['elementtype'][:32]!r} and {values} channels; convert it, for example to MET_SHORT"
        )
    msb = _is_true(fields, "BinaryDataByteOrderMSB", default=_is_true(fields, "ElementByteOrderMSB"))
    columns, origin = _position(fields, dimension)
    unit = fields.get("distanceunits", "").lower()
    if unit not in UNITS:
        raise UnsupportedScan(
            f"{_NAME}: DistanceUnits: expected one of {', '.join(filter(None, UNITS))}, found another; "
            "correct it"
        )
    return Raster(
        name=_NAME,
        shape=(i, j, k),
        channels=values if values > 1 else (more or [1])[0],
        inner=values > 1,
        colours=values in (3, 4) and code == "u1",
        dtype=np.dtype((">" if msb else "<") + code),
        columns=columns,
        origin=origin,
        offset=offset,
        packed="zlib" if _is_true(fields, "CompressedData") else None,
        mm_per_unit=UNITS[unit],
        modality=_MODALITIES.get(fields.get("modality", "").upper()),
        notes=() if _given(fields, _MATRIX) else (ORIENTATION_UNKNOWN,),
    )


def _header(data: bytes) -> tuple[dict[str, str], int]:
    """The fields by their names in lower case, and where the data begin: behind ElementDataFile, the last."""
    fields: dict[str, str] = {}
    start = 0
    while _LAST not in fields:
        end = data.find(b"\n", start, _LONGEST_HEADER)
        name, sign, value = data[start : max(end, start)].decode("utf-8", "replace").partition("=")
        name = name.strip().lower()
        if end < 0 or (not sign and name):
            raise DamagedScan(
                f"{_NAME}: expected a header of lines NAME = VALUE that ends with ElementDataFile, found "
                "another; send the whole file"
            )
        if name in fields:
            raise DamagedScan(
                f"{_NAME}: expected each field once, found {name[:32]!r} twice; correct the header"
            )
        if name:
            fields[name] = value.strip()
        start = end + 1
    return fields, start


def _is_true(fields: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    found = fields.get(name.lower())
    return default if found is None else found[:1].lower() in ("t", "1", "y")


def _given(fields: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """The value of the first of these names that there is."""
    return next((fields[name.lower()] for name in names if name.lower() in fields), None)


def _position(fields: Mapping[str, str], dimension: int) -> tuple[tuple[Triple, Triple, Triple], Triple]:
    """Columns and origin in LPS; each axis has a row of the matrix."""

    def read(field: str, text: str | None, default: list[float]) -> list[float]:
        return default if text is None else [*numbers(_NAME, field, text, len(default))]

    turn = np.array(
        read(
            "TransformMatrix",
            _given(fields, _MATRIX),
            np.eye(dimension).ravel().tolist(),
        )
    ).reshape(dimension, dimension)[:3, :3]
    sizes = read("ElementSpacing", _given(fields, _SPACING), [1.0] * dimension)[:3]
    x, y, z = read("Offset", _given(fields, _OFFSET), [0.0] * dimension)[:3]
    first, second, third = ((float(a), float(b), float(c)) for a, b, c in turn * np.array(sizes)[:, None])
    return (first, second, third), (x, y, z)
