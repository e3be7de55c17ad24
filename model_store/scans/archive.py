"""Unpack a zip of a few files within the limits: those of a scan's channels, or a header and its voxels."""

from __future__ import annotations

import io
import re
import zipfile

from model_store.errors import ScanTooLarge, UnsupportedScan
from model_store.scans.dicom.files import BOUNDED, ZIP, count_entries, reported
from model_store.scans.foreign import is_dicom
from model_store.scans.types import Limits

# What macOS and Windows add to a zip.
_SYSTEM = re.compile(r"(__MACOSX/|(.*/)?\.|(.*/)?(Thumbs\.db|desktop\.ini)$)")


def names_in(data: bytes, most: int) -> list[str]:
    """The names of a zip's files; empty for what is no zip, is damaged, or has more than `most` entries."""
    if not data.startswith(ZIP) or is_dicom(data) or count_entries(data) > most:
        return []
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [entry.filename for entry in archive.infolist() if _is_content(entry)]
    except MemoryError:
        raise
    except Exception:  # zipfile raises many kinds for a damaged archive
        return []


def heads_of(data: bytes, size: int) -> list[bytes]:
    """The first bytes of each file of a zip; empty where one cannot be unpacked."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [entry for entry in archive.infolist() if _is_content(entry)]
            if any(entry.compress_type not in BOUNDED for entry in entries):
                return []
            heads = []
            for entry in entries:
                with archive.open(entry) as file:
                    heads.append(file.read(size))
            return heads
    except MemoryError:
        raise
    except Exception:
        return []


def unpacked(data: bytes, limits: Limits, what: str) -> dict[str, bytes]:
    """The content of each file of a zip, which sentences call the zip of `what`, by its name.

    Raises UnsupportedScan, DamagedScan, ScanTooLarge.
    """
    with reported("the zip"):
        archive = zipfile.ZipFile(io.BytesIO(data))
        entries = [entry for entry in archive.infolist() if _is_content(entry)]
        if any(entry.flag_bits & 1 for entry in entries):
            raise UnsupportedScan(f"the zip of {what} is encrypted; send it without a password")
        if any(entry.compress_type not in BOUNDED for entry in entries):
            raise UnsupportedScan(f"expected a zip of stored or deflated files; zip the {what} again")
        size = sum(entry.file_size for entry in entries)
        if size > limits.max_decompressed:
            raise ScanTooLarge(
                f"expected at most {limits.max_decompressed} bytes of {what} in the zip, found {size}"
            )
        found = {}
        for entry in entries:
            with archive.open(entry) as file:
                # Without a size, zipfile unpacks everything before it cuts it to the announced size.
                found[entry.filename] = file.read(entry.file_size)
    return found


def _is_content(entry: zipfile.ZipInfo) -> bool:
    return not entry.is_dir() and _SYSTEM.match(entry.filename) is None
