"""The registry of scan formats: one entry per format that Locum reads.

Everything that depends on the set of formats is derived from `FORMATS`: which reader
`model_store.scan.decode` calls, the suffixes that are cut off a scan's name, the lists of formats in error
messages and in the API description, which folders of a training site are scans, and the table of
`docs/reference/formats.md`. The recipe "Add a scan format" is in `docs/recipes/scan-format.md`.

A scan is one blob of bytes for the service: one upload, one digest, one file of a cohort. A scan of several
files (a DICOM series) is sent as a zip, which is a format with its own `sniff` and `read`. In a training
folder such a scan may also be a folder of files, if its format has a `Series`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from model_store.scans import metaimage, nifti, nrrd, pair, png, tiff
from model_store.scans.dicom.deidentify import deidentify as deidentify_dicom
from model_store.scans.dicom.files import sniff as sniff_dicom
from model_store.scans.dicom.reading import read_dicom, read_series
from model_store.scans.foreign import advice, is_dicom
from model_store.scans.types import Limits, Parts, Scan


@dataclass(frozen=True)
class Series:
    """How a format stores one scan as several files.

    Attributes:
        sniff: whether a file is one of the scan's files, by its first 4096 bytes. It never raises.
        read: all files to one Scan, within the limits. Raises ScanError and nothing else, also for files that
            do not belong together.
    """

    sniff: Callable[[bytes], bool]
    read: Callable[[Parts, Limits], Scan]


@dataclass(frozen=True)
class About:
    """What the documentation says of a format.

    Attributes:
        reads: which files of it are read, and which are refused.
        mask: what is special of a mask in it.
        oracle: the independent reader with which a test compares it.
    """

    reads: str = ""
    mask: str = "values"
    oracle: str = ""


@dataclass(frozen=True)
class Format:
    """One format of scans.

    Attributes:
        name: value of `Scan.format`, stored with each scan of a cohort: unique, at most 16 characters.
        labels: what sentences call it; one label per kind of file.
        suffixes: of file names, in lower case. They only shorten a name: no reader is chosen by a suffix.
        sniff: whether the bytes are of this format. It reads little of them (a signature, the
            directory of an archive) and never raises.
        read: bytes to a Scan. It compares what the header announces with the limits before it allocates,
            decompresses or decodes anything. Raises ScanError and nothing else.
        deidentify: the same scan without what may name the patient or a date, for a file that `read` has
            read. Equal bytes and key give equal bytes. `key` maps UIDs.
        series: for a format that may also be several files.
        beside: of a scan of two files in one folder, the suffix of the one that names it and of the other.
        read_mask: how a mask's bytes are read, where that is not by `read`.
        about: what the documentation says of it.
    """

    name: str
    labels: tuple[str, ...]
    suffixes: tuple[str, ...]
    sniff: Callable[[bytes], bool]
    read: Callable[[bytes, Limits], Scan]
    deidentify: Callable[[bytes, Limits, bytes], bytes]
    series: Series | None = None
    beside: tuple[tuple[str, str], ...] = ()
    read_mask: Callable[[bytes, Limits], Scan] | None = None
    about: About = About()


def _starts_with(*signatures: bytes) -> Callable[[bytes], bool]:
    # The first 128 bytes of a DICOM file are free and may hold the signature of a TIFF, for example.
    return lambda data: data.startswith(signatures) and not is_dicom(data)


# The order decides where two formats accept the same bytes, and it is the order in sentences.
FORMATS: tuple[Format, ...] = (
    Format(
        "png",
        ("PNG",),
        (".png",),
        _starts_with(png.SIGNATURE),
        png.read_png,
        png.deidentify_png,
        read_mask=partial(png.read_png, indexed=True),
        about=About(
            "grey of 1 to 16 bits, colours and palettes; not animated, and not stored rotated",
            "of a palette its indices",
            "Pillow",
        ),
    ),
    Format(
        "tiff",
        ("TIFF",),
        (".tiff", ".tif"),
        _starts_with(*tiff.SIGNATURES),
        tiff.read_tiff,
        tiff.deidentify_tiff,
        read_mask=partial(tiff.read_tiff, indexed=True),
        about=About(
            "one page in strips or tiles; uncompressed, LZW, Deflate or PackBits; not stored rotated",
            "of a palette its indices",
            "Pillow",
        ),
    ),
    Format(
        "nifti",
        (".nii", ".nii.gz"),
        (".nii", ".nii.gz"),
        _starts_with(*nifti.SIGNATURES),
        nifti.read_nifti,
        nifti.deidentify_nifti,
        about=About(
            "NIfTI-1 and NIfTI-2 in both byte orders, colours, channels along a fourth axis",
            oracle="nibabel",
        ),
    ),
    Format(
        "nrrd",
        (".nrrd",),
        (".nrrd", ".seg.nrrd"),
        _starts_with(*nrrd.SIGNATURES),
        nrrd.read_nrrd,
        nrrd.deidentify_nrrd,
        about=About(
            "raw or gzip, in LPS, RAS or LAS, any directions; not with its voxels in another file (.nhdr)",
            "of a .seg.nrrd each segment by its code, name or number",
            "SimpleITK",
        ),
    ),
    Format(
        "metaimage",
        (".mha",),
        (".mha",),
        _starts_with(*metaimage.SIGNATURES),
        metaimage.read_metaimage,
        metaimage.deidentify_metaimage,
        about=About(
            "raw or compressed, any directions; not with its voxels in another file (.mhd)",
            oracle="SimpleITK",
        ),
    ),
    Format(
        "analyze",
        ("ANALYZE (.hdr with its .img)",),
        (".hdr", ".hdr.gz"),
        pair.sniff,
        pair.read_zip,
        pair.deidentify_zip,
        Series(pair.is_header, pair.read_pair),
        beside=((".hdr", ".img"), (".hdr.gz", ".img.gz")),
        about=About(
            "ANALYZE 7.5 and SPM's without a .mat, which say nothing of orientation (a note), and NIfTI of "
            "two files",
            oracle="nibabel",
        ),
    ),
    Format(
        "dicom",
        ("DICOM (.dcm, or a .zip of a series)",),
        (".dcm", ".zip"),
        sniff_dicom,
        read_dicom,
        deidentify_dicom,
        Series(is_dicom, read_series),
        about=About(
            "an image, a series, a study with a choice of its series, enhanced multi-frame, tilted "
            "gantries, ultrasound frame by frame",
            "SEG, RTSTRUCT, or a series of values",
            "SimpleITK",
        ),
    ),
)


def format_of(data: bytes) -> Format | None:
    """The first format that accepts the bytes; None for an unknown one."""
    return next((known for known in FORMATS if known.sniff(data)), None)


def kind_of(head: bytes) -> str:
    """What a file is, by its first bytes, in words."""
    if nifti.is_half(head):
        return (
            "this is a header (.hdr) of NIfTI or ANALYZE, without the voxels (.img): send both, or save them "
            "as one .nii"
        )
    if nrrd.is_half(head):
        return "this is a header (.nhdr) of NRRD, without the voxels (.raw): save both as one .nrrd"
    if metaimage.is_half(head):
        return "this is a header (.mhd) of MetaImage, without the voxels (.raw): save both as one .mha"
    known = format_of(head)
    return advice(head) if known is None else f"this is {' or '.join(known.labels)}"


def series_of(files: Iterable[bytes]) -> Series | None:
    """How to read several files as one scan, by the first file that a format recognises; None without one.

    Other files do not count here: the format's reader decides whether to skip or to reject a stray file.
    """
    known = [one.series for one in FORMATS if one.series is not None]
    return next((series for file in files for series in known if series.sniff(file)), None)


def strip_suffix(name: str) -> str:
    """A file name without the suffix of a format (`.nii.gz` is one suffix), in any case of letters."""
    suffixes = (suffix for known in FORMATS for suffix in known.suffixes if name.lower().endswith(suffix))
    return name[: len(name) - len(max(suffixes, key=len, default=""))]


def beside(name: str) -> str | None:
    """The name of the file that belongs to a scan's file of this name; None of a scan of one file."""
    for own, other in (names for known in FORMATS for names in known.beside):
        if name.lower().endswith(own):
            stem = name[: -len(own)]
            return stem + (other.upper() if name.endswith(own.upper()) else other)
    return None


def list_formats(conjunction: Literal["and", "or"]) -> str:
    """The formats in a sentence: 'PNG, TIFF, .nii or .nii.gz'."""
    *others, last = (label for known in FORMATS for label in known.labels)
    return f"{', '.join(others)} {conjunction} {last}"
