"""Formats that Locum does not read: recognised by their first bytes, each with advice on what to do."""

from __future__ import annotations

import io
import re
import zipfile

from model_store.scans.tiff import BIG_SIGNATURES

_BARE_DICOM = (
    "this is DICOM without its file header; export it again as a DICOM file (PS3.10), which begins with it"
)
_ZIP = b"PK\x03\x04"
_LOSSY = "save it as PNG from the original, since JPEG has altered the intensities"

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", f"this is JPEG; {_LOSSY}"),
    (b"\x00\x00\x00\x0cjP  ", "this is JPEG 2000; save it as PNG or TIFF"),
    (b"\xff\x4f\xff\x51", "this is JPEG 2000; save it as PNG or TIFF"),
    *((signature, "this is BigTIFF; save it as an ordinary TIFF") for signature in BIG_SIGNATURES),
    (b"NRRD", "this is NRRD of a version that is not known; save it as NIfTI (3D Slicer does)"),
    (b"\x89HDF\r\n\x1a\n", "this is HDF5 or MINC; convert it to NIfTI"),
    (b"\x93NUMPY", "this is a NumPy array, which has no orientation; save it as NIfTI or PNG"),
    (_ZIP, "this is a ZIP archive without DICOM files; send one scan at a time, unpacked"),
    *(
        (signature, "this is a surface (a mesh), and no mask of voxels; save it as a mask on the scan's grid")
        for signature in (b"solid ", b"# vtk", b"ply\n", b"ply\r\n")
    ),
    *(
        (signature, "this is a VTK or other XML file; save the voxels as NIfTI")
        for signature in (b"<?xml", b"<VTKFile")
    ),
    (b"MATLAB", "this is a MATLAB file, which has no orientation; save it as NIfTI"),
    (b"{", "this is text (JSON), and no image; if it has contours, save a mask of them as NIfTI or PNG"),
    (b"%PDF", "this is a PDF; export the image itself"),
    (b"GIF8", "this is GIF; save it as PNG"),
    (b"BM", "this is a bitmap; save it as PNG"),
    (b"RIFF", "this is WebP or another RIFF file; save it as PNG from the original"),
    (b"BZh", "this is bzip2; send .nii or .nii.gz"),
    (b"\xfd7zXZ", "this is xz; send .nii or .nii.gz"),
    (b"\x28\xb5\x2f\xfd", "this is Zstandard; send .nii or .nii.gz"),
)

# A DICOM data set without its preamble: it begins with group 0008, or has an element of group 0002 or 0008
# near its start.
_DICOM_ELEMENT = re.compile(rb"\A\x08\0.\0|[\x02\x08]\0.\0(?:UI|UL|CS|DA|TM|LO|SH|PN|OB)", re.DOTALL)


def is_dicom(data: bytes) -> bool:
    """Whether it is a DICOM file. Its first 128 bytes may hold any other signature, for example a TIFF's."""
    return data[128:132] == b"DICM"


def advice(data: bytes) -> str:
    """What the file is, as far as its first bytes show, and what to do, without a full stop."""
    if _DICOM_ELEMENT.search(data, 0, 256):
        return _BARE_DICOM
    if data.startswith(_ZIP) and not zipfile.is_zipfile(io.BytesIO(data)):
        return "this is a ZIP archive without its end, as if it was cut off; send the whole file"
    for signature, what in _SIGNATURES:
        if data.startswith(signature):
            return what
    return f"the format is not known (it begins with the bytes {data[:8].hex(' ')})"
