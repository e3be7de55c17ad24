"""A scan: from the bytes of a file to voxels, and from a mask to the bytes of a file.

What a file is, is told by its first bytes; nobody's file name is believed, or even known. Everything that a
header announces is checked against `Limits` before it is allocated, decompressed or decoded, and whatever is
wrong is a ScanError that says what to do.
"""

from __future__ import annotations

from model_store.errors import DamagedScan, ScanTooLarge, UnsupportedScan
from model_store.scans import png, tiff
from model_store.scans.encode import encode_nifti, encode_png
from model_store.scans.foreign import advice, is_dicom
from model_store.scans.nifti import read_gzipped, read_nifti
from model_store.scans.nifti_header import header_version
from model_store.scans.types import MIN_SIDE, Limits, Scan

__all__ = ["MIN_SIDE", "Limits", "Scan", "decode", "encode_nifti", "encode_png"]

_DEFAULT = Limits()


def decode(data: bytes, limits: Limits = _DEFAULT) -> Scan:
    """Decode a PNG, TIFF or NIfTI (.nii, .nii.gz).

    Raises:
        UnsupportedScan: another format, or a variant that is not read.
        DamagedScan: truncated, a header that lies, NaN.
        ScanTooLarge: beyond `limits`.
    """
    if not data:
        raise DamagedScan("the file is empty (0 bytes); send the file's content")
    if len(data) > limits.max_bytes:
        raise ScanTooLarge(
            f"expected at most {limits.max_bytes} bytes, found {len(data)}; send a smaller scan"
        )
    if is_dicom(data):
        raise UnsupportedScan(advice(data))
    if data.startswith(png.SIGNATURE):
        return png.read_png(data, limits)
    if data.startswith(tiff.SIGNATURES):
        return tiff.read_tiff(data, limits)
    if data.startswith(b"\x1f\x8b"):
        return read_gzipped(data, limits)
    if header_version(data[:4]) is not None:
        return read_nifti(data, limits)
    raise UnsupportedScan(advice(data))
