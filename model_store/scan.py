"""Decode scans from bytes to voxels, and encode masks to bytes.

The format is detected from the content alone; file names are not used. Every size in a header is compared
with `Limits` before anything of that size is allocated, decompressed or decoded. Every failure is a ScanError
that says what to do. The formats are registered in `model_store.scans.formats`; a zip may have several of
their files as the channels of one scan (`model_store.scans.channels`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from model_store.errors import DamagedScan, ScanError, ScanTooLarge, UnsupportedScan
from model_store.scans import channels
from model_store.scans.dicom import reading
from model_store.scans.dicom.files import MOST_FILES, ElementCount, read_dataset
from model_store.scans.dicom.masks import is_seg, read_seg
from model_store.scans.dicom.pixels import TRANSFER_SYNTAXES, no_image
from model_store.scans.dicom.reading import DicomSeries
from model_store.scans.dicom.structures import is_rtstruct, read_rtstruct
from model_store.scans.encode import encode_nifti, encode_nrrd, encode_png
from model_store.scans.foreign import advice, is_dicom
from model_store.scans.formats import beside, format_of, kind_of, list_formats, series_of, strip_suffix
from model_store.scans.types import MIN_SIDE, Limits, Note, Parts, Scan, Segment

__all__ = [
    "MIN_SIDE",
    "MOST_FILES",
    "TRANSFER_SYNTAXES",
    "DicomSeries",
    "ElementCount",
    "Limits",
    "Note",
    "Parts",
    "Scan",
    "Segment",
    "beside",
    "choose_series",
    "decode",
    "decode_mask",
    "deidentify",
    "encode_nifti",
    "encode_nrrd",
    "encode_png",
    "is_contours",
    "kind_of",
    "list_formats",
    "not_a_scan",
    "open_series",
    "read_dataset",
    "series_of",
    "strip_suffix",
]

_DEFAULT = Limits()


def open_series(content: bytes | Parts, limits: Limits) -> DicomSeries:
    """Read the headers of a DICOM scan; of one with several channels, those of the first channel's series.

    Raises as `decode`.
    """
    if isinstance(content, bytes) and channels.sniff(content):
        content = channels.first_series(content, limits)
    return reading.open_series(content, limits)


def choose_series(content: bytes, series: str | None, limits: Limits) -> bytes:
    """The one series of an upload of DICOM files that is named: by its number, its UID, or the end of it.

    What is returned has no other series, so all that is made of it is made of the named one. Without `series`
    it is the upload. Raises as `decode`, and UnsupportedScan for what has no series to choose from.
    """
    if series is None:
        return content
    if channels.sniff(content):
        raise UnsupportedScan(
            "`series` chooses one series of a DICOM study, and this scan has a file or series for each of "
            "its channels: leave it out, and send the chosen series of each channel"
        )
    known = format_of(content)
    if known is not None and known.name != "dicom":
        raise UnsupportedScan(
            f"`series` chooses one series of a DICOM study, and this is {' or '.join(known.labels)}: "
            "leave it out"
        )
    return content if known is None else reading.choose_series(content, series, limits)


def decode_mask(
    content: bytes | Parts, limits: Limits = _DEFAULT, scan: Scan | None = None, key: bytes | None = None
) -> Scan:
    """Decode a mask: a DICOM SEG, an RTSTRUCT, or what `decode` reads. Raises as `decode`.

    A PNG or TIFF with a palette of colours has the palette's indices for values. An RTSTRUCT is read on the
    grid of its `scan`: it raises UnsupportedScan without, and MaskMismatch for another. `key` is that of
    `deidentify`, where the scan was de-identified after the RTSTRUCT was drawn on it.
    """
    single = _single(content)
    if is_seg(single) or is_rtstruct(single):
        if len(single) > limits.max_bytes:
            raise ScanTooLarge(f"expected at most {limits.max_bytes} bytes, found {len(single)}")
        if is_seg(single):
            return read_seg(single, limits)
        if scan is None:
            raise UnsupportedScan(
                "this is an RTSTRUCT: contours, which make a mask on the grid of their scan; send it with "
                "the scan, or export it as a DICOM SEG"
            )
        return read_rtstruct(single, limits, scan, key)
    if isinstance(content, bytes) and len(content) <= limits.max_bytes:
        known = format_of(content)
        if known is not None and known.read_mask is not None:
            return known.read_mask(content, limits)
    return decode(content, limits)


def is_contours(content: bytes | Parts) -> bool:
    """Whether a mask is an RTSTRUCT, which `decode_mask` reads together with its scan."""
    return is_rtstruct(_single(content))


def _single(content: bytes | Parts) -> bytes:
    """The content of a file, or of the only file of a folder; nothing of several."""
    if isinstance(content, bytes):
        return content
    return next(iter(content.values())) if len(content) == 1 else b""


def not_a_scan(content: bytes) -> str | None:
    """What a file is that is neither a scan nor a mask, and what to do; None for one that may be."""
    if is_rtstruct(content):
        return None
    if is_dicom(content):
        with suppress(ScanError):
            header = read_dataset(content, _DEFAULT, "the file", pixels=False)
            return None if "Rows" in header else f"this is {no_image(header)}"
        return None
    return None if format_of(content) is not None or channels.sniff(content) else advice(content)


def decode(content: bytes | Parts, limits: Limits = _DEFAULT) -> Scan:
    """Decode one scan of a registered format: the bytes of a file, or the files of a series.

    Raises:
        UnsupportedScan: an unknown format, or an unsupported variant of one.
        DamagedScan: empty, truncated, an inconsistent header, NaN.
        ScanTooLarge: beyond `limits`.
    """
    parts = tuple(content.values()) if isinstance(content, Mapping) else (content,)
    size = sum(map(len, parts))
    if not size:
        raise DamagedScan("the file is empty (0 bytes); send the file's content")
    if size > limits.max_bytes:
        raise ScanTooLarge(f"expected at most {limits.max_bytes} bytes, found {size}; send a smaller scan")
    if isinstance(content, Mapping):
        if (series := series_of(parts)) is not None:
            return series.read(content, limits)
    elif channels.sniff(content):
        return channels.read_channels(content, limits, decode)
    elif (known := format_of(content)) is not None:
        return known.read(content, limits)
    raise UnsupportedScan(f"{advice(parts[0])}. Locum reads {list_formats('and')}")


def deidentify(content: bytes, limits: Limits, key: bytes) -> bytes:
    """Remove what may name the patient or a date from a scan that `decode` has read.

    What is left decodes to the same voxels and affine. Equal bytes and key give equal bytes; `key` maps the
    UIDs of DICOM. Raises as `decode`, and UnsupportedScan for a DICOM file without the UIDs that one needs.
    """
    if channels.sniff(content):
        return channels.deidentify_channels(content, limits, key, deidentify)
    known = format_of(content)
    if known is None:
        raise UnsupportedScan(f"{advice(content)}. Locum reads {list_formats('and')}")
    return known.deidentify(content, limits, key)
