"""Bytes of scans, written field by field so that readers are not tested with the library they use."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

CODES = {
    "u1": 2, "i1": 256, "i2": 4, "u2": 512, "i4": 8, "u4": 768, "i8": 1024, "u8": 1280, "f4": 16, "f8": 64,
}  # fmt: skip


def nifti1(voxels: NDArray[Any], order: str = "<", **fields: Any) -> bytes:
    """A NIfTI-1 file [I, J, K, …] with spacing 2, 3, 4 mm and origin -10, -20, -30 in its sform.

    `fields` overwrite header fields: dim, datatype, pixdim, vox_offset, scl_slope, scl_inter, magic,
    sform_code, qform_code, srow (3x4), quatern (b, c, d), qoffset, units.
    """
    dim = fields.get("dim", [voxels.ndim, *voxels.shape])
    dim = [*dim, *[1] * (8 - len(dim))]
    pixdim = fields.get("pixdim", [1.0, 2.0, 3.0, 4.0, 0, 0, 0, 0])
    srow = np.array(fields.get("srow", [[2, 0, 0, -10], [0, 3, 0, -20], [0, 0, 4, -30]]), float)
    offset = fields.get("vox_offset", 352.0)
    header = bytearray(348)
    struct.pack_into(order + "i", header, 0, 348)
    struct.pack_into(order + "8h", header, 40, *dim)
    struct.pack_into(order + "hh", header, 70, fields.get("datatype", CODES[voxels.dtype.str[1:]]), 0)
    struct.pack_into(order + "8f", header, 76, *pixdim)
    struct.pack_into(order + "f", header, 108, offset)
    struct.pack_into(order + "ff", header, 112, fields.get("scl_slope", 0.0), fields.get("scl_inter", 0.0))
    header[123] = fields.get("units", 2)
    struct.pack_into(order + "hh", header, 252, fields.get("qform_code", 0), fields.get("sform_code", 1))
    struct.pack_into(order + "3f", header, 256, *fields.get("quatern", (0.0, 0.0, 0.0)))
    struct.pack_into(order + "3f", header, 268, *fields.get("qoffset", (0.0, 0.0, 0.0)))
    struct.pack_into(order + "12f", header, 280, *srow.ravel())
    header[344:348] = fields.get("magic", b"n+1\0")
    data = voxels.astype(voxels.dtype.newbyteorder(order)).tobytes(order="F")
    return bytes(header) + bytes(4) + data


def metaimage(voxels: NDArray[Any], *, compress: bool = False) -> bytes:
    """A MetaImage [I, J, K] of int16 with spacing 2, 3, 4 mm and origin -10, -20, -30."""
    data = voxels.astype("<i2").tobytes(order="F")
    lines = (
        "ObjectType = Image",
        "NDims = 3",
        "BinaryData = True",
        f"CompressedData = {compress}",
        "TransformMatrix = 1 0 0 0 1 0 0 0 1",
        "Offset = -10 -20 -30",
        "ElementSpacing = 2 3 4",
        f"DimSize = {' '.join(map(str, voxels.shape))}",
        "ElementType = MET_SHORT",
        "ElementDataFile = LOCAL",
    )
    return "\n".join(lines).encode() + b"\n" + (zlib.compress(data) if compress else data)


def png(width: int, height: int, bits: int, colour: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that deflates `rows`: for each row a filter byte, then the samples."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [
            chunk(b"IHDR", header),
            *(chunk(kind, body) for kind, body in chunks),
            chunk(b"IDAT", zlib.compress(rows)),
            chunk(b"IEND", b""),
        ]
    )


def tiff(pixels: NDArray[Any], order: str = "<", **tags: Any) -> bytes:
    """An uncompressed one-strip TIFF of grey [H, W] or colour [H, W, 3] pixels, in their own type.

    `tags` overwrite or add directory entries by number (t322=16 is TileWidth 16); `next` is the next
    directory.
    """
    height, width = pixels.shape[:2]
    samples = 1 if pixels.ndim == 2 else pixels.shape[2]
    data = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    kind = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    entries: dict[int, tuple[str, tuple[int, ...]]] = {
        256: ("I", (width,)),
        257: ("I", (height,)),
        258: ("H", (8 * pixels.dtype.itemsize,) * samples),
        259: ("H", (1,)),
        262: ("H", (1 if samples == 1 else 2,)),
        273: ("I", (8,)),
        277: ("H", (samples,)),
        278: ("I", (height,)),
        279: ("I", (len(data),)),
        339: ("H", (kind,) * samples),
    }
    following = tags.pop("next", 0)
    for name, value in tags.items():
        entries[int(name[1:])] = ("I", value if isinstance(value, tuple) else (value,))
    start = 8 + len(data) + len(data) % 2
    directory = struct.pack(order + "H", len(entries))
    extra = b""
    extra_start = start + 2 + 12 * len(entries) + 4
    for tag, (letter, values) in sorted(entries.items()):
        packed = struct.pack(f"{order}{len(values)}{letter}", *values)
        if len(packed) > 4:
            location = struct.pack(order + "I", extra_start + len(extra))
            extra += packed
        else:
            location = packed.ljust(4, b"\0")
        directory += struct.pack(order + "HHI", tag, {"H": 3, "I": 4}[letter], len(values)) + location
    magic = b"II*\0" if order == "<" else b"MM\0*"
    padded = data + bytes(len(data) % 2)
    return (
        magic
        + struct.pack(order + "I", start)
        + padded
        + directory
        + struct.pack(order + "I", following)
        + extra
    )
