"""NIfTI-1 and NIfTI-2, single file, plain or gzip: bytes to a Scan."""

from __future__ import annotations

import gzip
from typing import Any, Literal

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from model_store.errors import DamagedScan, UnsupportedScan
from model_store.scans.inflate import BoundedGunzip
from model_store.scans.nifti_header import HEADER_SIZES, NiftiHeader, header_version, parse_header
from model_store.scans.types import Limits, Note, Scan, check_finite

_GZIP = b"\x1f\x8b"
_BYTE_ORDERS: tuple[Literal["little", "big"], ...] = ("little", "big")
# A header begins with its own size, in either byte order. A gzip file is expected to hold a NIfTI.
SIGNATURES = (_GZIP, *(size.to_bytes(4, order) for size in HEADER_SIZES for order in _BYTE_ORDERS))

_LONGEST_HEADER = 540

# Some writers pad the end of the file. More bytes than this are data that the header does not announce.
_TRAILING_ALLOWED = 1024

# Deflate needs at least 2 bits for 258 bytes. A header that announces more than that is wrong.
_DEFLATE_MAX_RATIO = 1032

# Fields for people, in which converters write names, dates and comments (of NIfTI-1 and NIfTI-2).
_TEXTS = ("data_type", "db_name", "descrip", "aux_file", "intent_name", "unused_str")
# Flags of gzip (RFC 1952 2.3.1) for further fields of its header: a file name, a comment, and others.
_GZIP_FIELDS = 0b11110
_COMPRESSION = 1


def is_half(head: bytes) -> bool:
    """Whether a file's first bytes (more than a header) are a header with its voxels in another file."""
    header = head.startswith(SIGNATURES) and not head.startswith(_GZIP)
    return header and (len(head) in HEADER_SIZES or head[344:347] == b"ni1" or head[4:7] == b"ni2")


def read_nifti(data: bytes, limits: Limits) -> Scan:
    """Read a .nii or .nii.gz. Raises DamagedScan, UnsupportedScan, ScanTooLarge."""
    return _read_gzipped(data, limits) if data.startswith(_GZIP) else _read_plain(data, limits)


def _read_plain(data: bytes, limits: Limits) -> Scan:
    """Read an uncompressed file. The voxels are a view of `data` if its type and byte order allow it."""
    header = parse_header(data[:_LONGEST_HEADER], limits)
    found = len(data) - header.data_offset
    _check_length(header, found)
    return _scan(header, memoryview(data)[header.data_offset :][: header.data_bytes])


def _read_gzipped(data: bytes, limits: Limits) -> Scan:
    """Read a gzip file: the header first, then no more bytes than it announces."""
    header, content, _ = _inflated(data, limits)
    return _scan(header, content[header.data_offset :])


def _inflated(data: bytes, limits: Limits) -> tuple[NiftiHeader, memoryview, bool]:
    """The header, the content up to the last voxel, and whether one gzip member has these alone."""
    stream = BoundedGunzip(data)
    start = memoryview(bytearray(_LONGEST_HEADER))
    start = start[: stream.read_into(start)]
    if header_version(bytes(start)) is None:
        raise UnsupportedScan(
            "gzip: expected a NIfTI volume (.nii.gz), found something else; send PNG and TIFF as they are"
        )
    header = parse_header(bytes(start), limits)
    size = header.data_offset + header.data_bytes
    if size > _DEFLATE_MAX_RATIO * len(data):
        raise DamagedScan(
            f"NIfTI: the header announces {size} bytes, more than {len(data)} compressed bytes can hold; "
            "send the whole file"
        )
    content = np.empty(size, np.uint8).data
    already = min(len(start), len(content))
    content[:already] = start[:already]
    filled = already + stream.read_into(content[already:])
    surplus = len(start) - already + stream.read_into(memoryview(bytearray(_TRAILING_ALLOWED + 1)))
    _check_length(header, filled - header.data_offset + surplus)
    return header, content, surplus == 0 and stream.is_one_member


def deidentify_nifti(data: bytes, limits: Limits, _key: bytes) -> bytes:
    """Clear the text fields, and leave out extensions, bytes after the voxels, and gzip's file name and time.

    A file without any of these is returned as it is. Raises as `read_nifti`.
    """
    if not data.startswith(_GZIP):
        header = parse_header(data[:_LONGEST_HEADER], limits)
        return _without_texts(header, memoryview(data))
    header, content, alone = _inflated(data, limits)
    cleaned = _without_texts(header, content)
    if alone and cleaned == content and not data[3] & _GZIP_FIELDS:
        return data[:4] + bytes(4) + data[8:]
    return gzip.compress(cleaned, _COMPRESSION, mtime=0)


def _without_texts(header: NiftiHeader, content: memoryview) -> bytes:
    version, order = header_version(bytes(content[:4])) or (1, "<")
    kind: Any = nib.Nifti1Header if version == 1 else nib.Nifti2Header
    size = kind.sizeof_hdr
    block = kind(bytes(content[:size]), endianness=order, check=False)
    for field in {*_TEXTS} & {*block.keys()}:
        block[field] = b""
    block["vox_offset"] = size + 4
    voxels = content[header.data_offset :][: header.data_bytes]
    return bytes(block.binaryblock) + bytes(4) + bytes(voxels)


def _check_length(header: NiftiHeader, found: int) -> None:
    announced = " x ".join(map(str, header.shape))
    if found < header.data_bytes:
        raise DamagedScan(
            f"NIfTI: the header announces {announced} voxels ({header.data_bytes} bytes), "
            f"found {max(found, 0)} bytes of data; send the whole file"
        )
    if found > header.data_bytes + _TRAILING_ALLOWED:
        raise DamagedScan(
            f"NIfTI: the header announces {announced} voxels ({header.data_bytes} bytes), "
            "but more data follow; its dimensions are wrong"
        )


def _scan(header: NiftiHeader, content: memoryview) -> Scan:
    stored = np.frombuffer(content, header.dtype)
    notes = list(header.notes)
    voxels: NDArray[Any]
    if header.samples == 1:
        voxels = stored.reshape((*header.shape, header.channels), order="F")
    else:
        # The samples of one voxel are adjacent; after them the first axis varies fastest.
        voxels = np.moveaxis(stored.reshape((header.samples, *header.shape), order="F"), 0, -1)
        if header.samples == 4:
            if int(voxels[..., 3].min()) < 255:
                notes.append(Note("alpha-ignored", "the transparency (alpha) of the volume is ignored"))
            voxels = voxels[..., :3]
    check_finite(voxels, "NIfTI")
    if header.samples == 1 and (header.slope, header.intercept) != (1.0, 0.0):
        # float32 is precise enough for a scaled 16-bit value; wider integers need float64.
        narrow = voxels.dtype.itemsize <= 2 or voxels.dtype == np.float32
        with np.errstate(over="ignore"):  # an overflow becomes infinity, which check_finite rejects below
            voxels = np.multiply(voxels, header.slope, dtype=np.float32 if narrow else np.float64)
            voxels += header.intercept
        check_finite(voxels, "NIfTI, scaled")
    elif not voxels.dtype.isnative:
        voxels = voxels.astype(voxels.dtype.newbyteorder("="), order="K")
    voxels.flags.writeable = False
    return Scan(voxels, header.affine, "nifti", header.mm_per_unit, tuple(notes), header.forms)
