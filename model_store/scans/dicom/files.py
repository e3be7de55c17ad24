"""Read the headers of DICOM files from a zip or from loose files, within the limits.

A file's name is never used, kept or reported: it often is the patient's name. An error names a file by its
number in the zip or in the request.
"""

from __future__ import annotations

import io
import logging
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pydicom
from pydicom import Dataset
from pydicom.filereader import read_dataset as read_header
from pydicom.uid import DeflatedExplicitVRLittleEndian

from model_store.errors import DamagedScan, ScanError, ScanTooLarge, UnsupportedScan
from model_store.scans.foreign import is_dicom
from model_store.scans.inflate import inflated
from model_store.scans.types import Limits, Parts

# pydicom quotes values of headers, hence patients, in what it logs and warns of.
logging.getLogger("pydicom").setLevel(logging.CRITICAL + 1)
warnings.filterwarnings("ignore", module=r"pydicom(\.|$)")
pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE

ZIP = b"PK\x03\x04"
MOST_FILES = 20_000
# A zip with a DICOM file is recognised by one of its first files.
_SNIFFED_FILES = 64
# The methods of which zipfile bounds the output: a BZIP2 or LZMA entry of some bytes unpacks to gigabytes.
_BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MODERN = "export the series again as DICOM files (PS3.10)"

Content = Callable[[], bytes]


@contextmanager
def reported(what: str, advice: str = "export it again, or check the transfer") -> Iterator[None]:
    """Turn every error of a parser or decoder into DamagedScan, without its text: it may quote the header."""
    try:
        yield
    except (ScanError, MemoryError):
        raise
    except Exception as error:
        raise DamagedScan(f"DICOM: {what} cannot be read ({type(error).__name__}); {advice}") from None


def sniff(data: bytes) -> bool:
    """Whether it is a DICOM file, or a zip with one among its first files.

    It is also true of a zip that `contents_of_zip` rejects for its compression, so that the client gets the
    reason.
    """
    if not data.startswith(ZIP) or is_dicom(data):
        return is_dicom(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()][:_SNIFFED_FILES]
            if any(entry.compress_type not in _BOUNDED for entry in entries):
                return True
            return any(_is_dicom_entry(archive, entry) for entry in entries)
    except MemoryError:
        raise
    except Exception:  # zipfile raises many kinds for a damaged archive
        return False


def _is_dicom_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool | None:
    """Whether a file of the zip is DICOM; None if its beginning cannot be unpacked."""
    try:
        with archive.open(entry) as file:
            return is_dicom(file.read(132))
    except MemoryError:
        raise
    except Exception:
        return None


def contents_of_zip(data: bytes, limits: Limits) -> tuple[list[Content], int]:
    """List the DICOM files of a zip, each to be unpacked when called, and count the other files.

    Raises ScanTooLarge, DamagedScan, UnsupportedScan.
    """
    with reported("the zip"):
        archive = zipfile.ZipFile(io.BytesIO(data))
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        _check_number(len(entries))
        if any(entry.flag_bits & 1 for entry in entries):
            raise UnsupportedScan("DICOM: the zip is encrypted; send it without a password")
        methods = {entry.compress_type for entry in entries}.difference(_BOUNDED)
        if methods:
            raise UnsupportedScan(
                "DICOM: expected files in the zip that are stored or deflated, found compression method "
                f"{min(methods)}; zip the series again with the default method"
            )
        size = sum(entry.file_size for entry in entries)
        if size > limits.max_decompressed:
            raise ScanTooLarge(
                f"DICOM: expected at most {limits.max_decompressed} bytes in the zip, found {size}; send one "
                "series, without other files"
            )
        # A file that cannot be unpacked is kept: reading it gives the error.
        kept = [entry for entry in entries if _is_dicom_entry(archive, entry) is not False]

    def reader(entry: zipfile.ZipInfo) -> Content:
        def read() -> bytes:
            try:
                with archive.open(entry) as file:
                    # Without a size, zipfile unpacks everything before it cuts it to the announced size.
                    return file.read(entry.file_size)
            except MemoryError:
                raise
            except Exception as error:  # zipfile raises many kinds for a damaged archive
                raise DamagedScan(
                    f"DICOM: a file of the zip cannot be unpacked ({type(error).__name__}); "
                    "zip the series again"
                ) from None

        return read

    return [reader(entry) for entry in kept], len(entries) - len(kept)


def contents_of_parts(parts: Parts) -> tuple[list[Content], int]:
    """List the DICOM files among loose files, and count the others."""
    _check_number(len(parts))
    kept = [part for part in parts.values() if is_dicom(part)]
    return [lambda part=part: part for part in kept], len(parts) - len(kept)  # type: ignore[misc]


def _check_number(files: int) -> None:
    if files > MOST_FILES:
        raise ScanTooLarge(f"DICOM: expected at most {MOST_FILES} files, found {files}; send one series")


def read_dataset(content: bytes, limits: Limits, where: str, *, pixels: bool) -> Dataset:
    """Parse one file; without `pixels` only its header. Raises DamagedScan, UnsupportedScan, ScanTooLarge."""
    with reported(where):
        _check_inflated(content, limits, where)
        dataset = pydicom.dcmread(io.BytesIO(content), stop_before_pixels=not pixels, force=False)
        if "TransferSyntaxUID" not in dataset.file_meta:
            raise UnsupportedScan(
                f"DICOM: {where} does not say its transfer syntax (no file meta information); {_MODERN}"
            )
        return dataset


def _check_inflated(content: bytes, limits: Limits, where: str) -> None:
    """Bound the deflated transfer syntax, which pydicom inflates without a limit."""
    stream = io.BytesIO(content)
    stream.seek(132)
    meta = read_header(stream, False, True, stop_when=lambda tag, vr, length: tag.group != 2)  # noqa: ARG005
    if meta.get("TransferSyntaxUID") != DeflatedExplicitVRLittleEndian:
        return
    inflater, found = zlib.decompressobj(-zlib.MAX_WBITS), 0
    for part in inflated(inflater, [memoryview(content)[stream.tell() :]]):
        found += len(part)
        if found > limits.max_decompressed:
            raise ScanTooLarge(
                f"DICOM: {where} inflates to more than {limits.max_decompressed} bytes; send a smaller scan"
            )
