"""A header (.hdr) of ANALYZE 7.5 or NIfTI and its voxels (.img), plain or gzip: two files to a Scan.

They are read as the one .nii that has both. NIfTI's header says where the volume is. ANALYZE's does not: it
is read as nibabel reads it, with the first axis to the patient's left, the second to anterior, and with SPM's
origin and scale where it has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import nibabel as nib
import numpy as np

from model_store.errors import DamagedScan, ScanError, UnsupportedScan
from model_store.scans.archive import heads_of, names_in, unpacked
from model_store.scans.dicom.files import reported, zip_of
from model_store.scans.inflate import BoundedGunzip
from model_store.scans.nifti import deidentify_nifti, read_nifti
from model_store.scans.nifti_header import header_version, parse_header
from model_store.scans.types import Limits, Note, Parts, Scan

_WHAT: Final = "header and voxels"
_GZIP: Final = b"\x1f\x8b"
_PIECE = 2**20
# A header, its voxels, and SPM's .mat, which is refused in words.
_MOST_FILES: Final = 3
_SIZES: Final = {1: 348, 2: 540}
_LONGEST: Final = 540
_HEAD: Final = 1024
# More bytes behind the voxels are data that the header does not announce.
_TRAILING_ALLOWED = 1024
# Where the magic is, that of a header with its voxels elsewhere, and that of one file.
_MAGIC: Final = {1: (344, b"ni1\0", b"n+1\0"), 2: (4, b"ni2\0\r\n\x1a\n", b"n+2\0\r\n\x1a\n")}
_RGB: Final = 128
# What is read of a header of ANALYZE: its size, the sides, type and spacings, the offset and SPM's scale of
# the voxels, and SPM's origin. All else are names, dates and a patient's number.
_READ: Final = ((0, 4), (40, 56), (70, 74), (76, 116), (253, 263))
_UNKNOWN = Note(
    "orientation-unknown",
    "ANALYZE says nothing about orientation: the first axis is taken to the patient's left, the second to "
    "anterior, as nibabel and SPM do",
)


def is_header(head: bytes) -> bool:
    """Whether a file's first bytes (1024, or all of fewer) are a header with its voxels in another file."""
    try:
        head = _plain(head, _LONGEST)
    except ScanError:
        return False
    version, _ = header_version(head) or (0, "")
    if version == 0:
        return False
    start, apart, together = _MAGIC[version]
    magic = head[start : start + len(apart)]
    return magic == apart or (version == 1 and len(head) == _SIZES[1] and magic != together)


def sniff(data: bytes) -> bool:
    """Whether it is a zip of few files, of which one is such a header."""
    return len(names_in(data, _MOST_FILES)) > 1 and any(map(is_header, heads_of(data, _HEAD)))


def read_zip(data: bytes, limits: Limits) -> Scan:
    """Read a zip of both files. Raises as `read_pair`."""
    return read_pair(unpacked(data, limits, _WHAT), limits)


def read_pair(parts: Parts, limits: Limits) -> Scan:
    """Read a header and its voxels. Raises DamagedScan, UnsupportedScan, ScanTooLarge."""
    pair = _Pair.of(parts, limits)
    scan = read_nifti(pair.joined, limits)
    notes = scan.notes
    if not pair.is_nifti:
        notes = (*(note for note in notes if note.name != _UNKNOWN.name), _UNKNOWN)
    return replace(scan, format="analyze", notes=notes)


def deidentify_zip(data: bytes, limits: Limits, key: bytes) -> bytes:
    """Write both files newly, with what is read alone. Raises as `read_pair`."""
    pair = _Pair.of(unpacked(data, limits, _WHAT), limits)
    cleaned = deidentify_nifti(pair.joined, limits, key)
    size = len(pair.header)
    if pair.is_nifti:
        header = _with(cleaned[:size], apart=True, offset=0)
    else:
        blank = bytearray(size)
        for start, end in _READ:
            blank[start:end] = pair.header[start:end]
        header = _with(bytes(blank), offset=0)
    return zip_of((header, cleaned[size + 4 :]))


@dataclass(frozen=True)
class _Pair:
    """Both files as they were sent, unpacked: of the voxels' what the header announces.

    Attributes:
        header: 348 bytes, or 540 of NIfTI-2.
        is_nifti: whether it says where the volume is.
        joined: the .nii that has both.
    """

    header: bytes
    is_nifti: bool
    joined: bytes

    @classmethod
    def of(cls, parts: Parts, limits: Limits) -> _Pair:
        """Tell the two files apart by their content. Raises as `read_pair`."""
        headers = [each for each in parts.values() if is_header(each[:_HEAD])]
        others = [each for each in parts.values() if not is_header(each[:_HEAD])]
        if len(headers) != 1 or len(others) != 1:
            raise UnsupportedScan(
                f"ANALYZE: expected one header (.hdr) and its voxels (.img), found {len(headers)} headers "
                f"and {len(others)} other files; send the two files of one volume, or, if SPM has a .mat of "
                "it, save it as NIfTI"
            )
        block = _plain(headers[0], _LONGEST)
        version, order = header_version(block) or (1, "<")
        header = block[: _SIZES[version]]
        start, apart, _ = _MAGIC[version]
        is_nifti = block[start : start + len(apart)] == apart
        if len(header) < _SIZES[version]:
            raise DamagedScan(f"NIfTI: the header ends within its {_SIZES[version]} bytes; send it whole")
        with reported("ANALYZE: the header", "save the volume as NIfTI"):
            own = header if is_nifti else _as_nifti(header, order)
        offset = _offset(header, version, order)
        made = _with(own, apart=False, offset=len(own) + 4)
        # Before anything of its size is unpacked.
        announced = parse_header(made, limits).data_bytes
        voxels = _plain(others[0], offset + announced + _TRAILING_ALLOWED)
        return cls(header, is_nifti, made + bytes(4) + voxels[offset:])


def _plain(data: bytes, most: int) -> bytes:
    """The content of a file, or of what was compressed to it: not much more than `most` bytes of that."""
    if not data.startswith(_GZIP):
        return data
    stream, content, left = BoundedGunzip(data), bytearray(), most + 1
    piece = memoryview(bytearray(min(_PIECE, left)))
    while len(content) < left and (count := stream.read_into(piece[: left - len(content)])):
        content += piece[:count]
    return bytes(content)


def _header_of(header: bytes, version: int, order: str) -> Any:
    kind: Any = {1: nib.Nifti1Header, 2: nib.Nifti2Header}[version]
    return kind(header, endianness=order, check=False)


def _offset(header: bytes, version: int, order: str) -> int:
    """Where the voxels begin in their file."""
    offset = float(_header_of(header, version, order)["vox_offset"])
    if not 0 <= offset <= _TRAILING_ALLOWED or offset != int(offset):
        raise DamagedScan(
            f"ANALYZE: expected voxels from byte 0 to {_TRAILING_ALLOWED} of their file on, the header says "
            f"{offset:g}; save the volume as NIfTI"
        )
    return int(offset)


def _with(header: bytes, *, offset: int, apart: bool | None = None) -> bytes:
    """A header with another offset of the voxels, and NIfTI's magic if `apart` is given."""
    version, order = header_version(header) or (1, "<")
    made = _header_of(header, version, order)
    made["vox_offset"] = offset
    block = bytearray(made.binaryblock)
    if apart is not None:
        start, own, together = _MAGIC[version]
        block[start : start + len(own)] = own if apart else together
    return bytes(block)


# Damaged numbers may overflow before the reader of NIfTI rejects them.
@np.errstate(all="ignore")
def _as_nifti(header: bytes, order: str) -> bytes:
    """A header of ANALYZE as NIfTI's: without a form, or with the one of SPM's origin."""
    found: Any = nib.Spm2AnalyzeHeader(header, endianness=order, check=False)
    if int(found["datatype"]) == _RGB:
        raise UnsupportedScan(
            "ANALYZE: expected grey voxels, found colours, of which the order is not fixed; save it as NIfTI"
        )
    made: Any = nib.Nifti1Header(endianness=order)
    for field in ("dim", "datatype", "bitpix"):
        made[field] = found[field]
    # Sides that are not used are often 0; NIfTI's are 1.
    made["dim"][4:] = np.maximum(made["dim"][4:], 1)
    made["pixdim"][1:] = np.abs(found["pixdim"][1:])
    scale, _ = found.get_slope_inter()
    made["scl_slope"] = 1.0 if scale is None else scale
    if np.any(found["origin"][:3]):
        found["pixdim"] = np.abs(found["pixdim"])
        made.set_sform(found.get_best_affine(), code=1)
    return bytes(made.binaryblock)
