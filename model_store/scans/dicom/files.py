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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pydicom
from pydicom import DataElement, Dataset, FileMetaDataset
from pydicom.dataelem import RawDataElement
from pydicom.filereader import read_dataset as read_header
from pydicom.filereader import read_sequence
from pydicom.hooks import raw_element_vr
from pydicom.uid import DeflatedExplicitVRLittleEndian
from pydicom.valuerep import FLOAT_VR, INT_VR, STR_VR, VR

from model_store.errors import DamagedScan, ScanError, ScanTooLarge, UnsupportedScan
from model_store.scans.foreign import is_dicom
from model_store.scans.inflate import inflated
from model_store.scans.types import Limits, Parts

# pydicom quotes values of headers, hence patients, in what it logs and warns of.
logging.getLogger("pydicom").setLevel(logging.CRITICAL + 1)
warnings.filterwarnings("ignore", module=r"pydicom(\.|$)")
pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE

ZIP = b"PK\x03\x04"
_ZIP_ENTRY = b"PK\x01\x02"
MOST_FILES = 20_000
# In all headers of a scan, 50 for each of MOST_FILES frames. By the default limit of voxels a series has at
# most 2000 slices of 256 x 256, and a slice some 100 to 400 elements; an enhanced file has tens a frame.
MOST_ELEMENTS = 50 * MOST_FILES
# In one file, 150 for each of 2000 frames of an enhanced file. They cost some 5 s and 300 MB.
MOST_ELEMENTS_OF_FILE = 150 * 2000
# Sequence items of one file, of which each costs as much as several elements: 50 for each of 2000 frames.
# Scanners write 5 to 20 for a frame or slice. All headers may have twice as many.
MOST_ITEMS = 50 * 2000
# Folders are entries too, and a zip may lie in the zip.
_MOST_ENTRIES = 2 * MOST_FILES
# The methods of which zipfile bounds the output: a BZIP2 or LZMA entry of some bytes unpacks to gigabytes.
BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Bytes of an item that pydicom looks at to find its encoding: a tag and a type.
_AHEAD = 6
_MODERN = "export the series again as DICOM files (PS3.10)"
_PIXELS = 0x7FE0
# An RT structure set is often among its images; its millions of values are never used.
_CONTOUR_DATA = 0x30060050
# The types of which a value of n bytes becomes a list of up to n / 2 numbers.
_NUMBERS = (INT_VR | FLOAT_VR | {VR.US_SS, VR.US_OW}) - STR_VR

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
    """Whether it is a DICOM file, or a zip with one: the images of a patient's CD follow its viewer.

    It is also true of a zip that `contents_of_zip` rejects for its compression or its number of entries, so
    that the client gets the reason.
    """
    if not data.startswith(ZIP) or is_dicom(data):
        return is_dicom(data)
    if count_entries(data) > _MOST_ENTRIES:
        return True
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            if any(entry.compress_type not in BOUNDED for entry in entries):
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
    # Before zipfile makes an object of each.
    if (number := count_entries(data)) > _MOST_ENTRIES:
        _check_number(number)
    with reported("the zip"):
        archive = zipfile.ZipFile(io.BytesIO(data))
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        _check_number(len(entries))
        if any(entry.flag_bits & 1 for entry in entries):
            raise UnsupportedScan("DICOM: the zip is encrypted; send it without a password")
        methods = {entry.compress_type for entry in entries}.difference(BOUNDED)
        if methods:
            raise UnsupportedScan(
                "DICOM: expected files in the zip that are stored or deflated, found compression method "
                f"{min(methods)}; zip the series again with the default method"
            )
        # A file that cannot be unpacked is kept: reading it gives the error.
        kept = [entry for entry in entries if _is_dicom_entry(archive, entry) is not False]
        size = sum(entry.file_size for entry in kept)
        if size > limits.max_decompressed:
            raise ScanTooLarge(
                f"DICOM: expected at most {limits.max_decompressed} bytes of DICOM files in the zip, found "
                f"{size}; send one series"
            )

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


def zip_of(files: Iterable[bytes]) -> bytes:
    """Write a stored zip of files in this order, without names and times; one file in memory at a time."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for place, file in enumerate(files):
            archive.writestr(zipfile.ZipInfo(f"{place:05d}"), file)
    return packed.getvalue()


def count_entries(data: bytes) -> int:
    """Count files and folders of a zip: at least as many as zipfile makes objects of when it opens it."""
    return data.count(_ZIP_ENTRY)


def contents_of_parts(parts: Parts) -> tuple[list[Content], int]:
    """List the DICOM files among loose files, and count the others."""
    _check_number(len(parts))
    kept = [part for part in parts.values() if is_dicom(part)]
    return [lambda part=part: part for part in kept], len(parts) - len(kept)  # type: ignore[misc]


def _check_number(files: int) -> None:
    if files > MOST_FILES:
        raise ScanTooLarge(f"DICOM: expected at most {MOST_FILES} files, found {files}; send one series")


class ElementCount:
    """Counts what the headers of one scan are parsed into, which is far larger than their bytes.

    pydicom makes about 2000 bytes of an empty sequence item of 8, and hundreds of each value of a list.
    """

    def __init__(self) -> None:
        self._left = MOST_ELEMENTS
        self._items_left = 2 * MOST_ITEMS
        self.next_file()

    def next_file(self) -> None:
        """Begin to count those of another file."""
        self._left_of_file = MOST_ELEMENTS_OF_FILE
        self._items_left_of_file = MOST_ITEMS

    def take(self, count: int) -> None:
        """Count more of them. Raises ScanTooLarge above the limit of a file, or of all."""
        self._left -= count
        self._left_of_file -= count
        if self._left < 0 or self._left_of_file < 0:
            raise ScanTooLarge(
                f"DICOM: expected at most {MOST_ELEMENTS} elements, sequence items and listed values in all "
                f"headers and {MOST_ELEMENTS_OF_FILE} in a file, found more; send one series, without "
                "private attributes"
            )

    def take_items(self, count: int) -> None:
        """Count more sequence items. Raises ScanTooLarge above the limit of a file, or of all."""
        self._items_left -= count
        self._items_left_of_file -= count
        if self._items_left < 0 or self._items_left_of_file < 0:
            raise ScanTooLarge(
                f"DICOM: expected at most {MOST_ITEMS} sequence items in a file and {2 * MOST_ITEMS} in all "
                "headers, found more; send one series, without private attributes"
            )


class _CountedFile(io.BytesIO):
    """A file that counts what pydicom parses: it reads the 8 bytes of a tag and a length for each.

    It so counts in every encoding, and what is no valid item but is parsed as one. A value of 8 bytes counts
    too. It reads up to six bytes of each item ahead, and goes back to its start.
    """

    def __init__(self, content: bytes, elements: ElementCount) -> None:
        super().__init__(content)
        self._elements = elements

    def read(self, size: int | None = -1, /) -> bytes:
        if size == 8:
            self._elements.take(1)
        return super().read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_SET and 0 <= self.tell() - offset <= _AHEAD:
            self._elements.take_items(1)
        return super().seek(offset, whence)


def read_dataset(
    content: bytes, limits: Limits, where: str, *, pixels: bool, elements: ElementCount | None = None
) -> Dataset:
    """Parse one file with all its sequences; without `pixels` only its header.

    `elements` is shared by files of which the headers are kept. Raises DamagedScan, UnsupportedScan,
    ScanTooLarge.
    """
    elements = elements or ElementCount()
    elements.next_file()
    with reported(where):
        try:
            dataset = _parsed(content, limits, where, elements, pixels=pixels)
            _parse_sequences(dataset, elements)
        finally:
            # pydicom replaces what is raised within an item by an OSError.
            elements.take(0)
            elements.take_items(0)
        if "TransferSyntaxUID" not in dataset.file_meta:
            raise UnsupportedScan(
                f"DICOM: {where} does not say its transfer syntax (no file meta information); {_MODERN}"
            )
        return dataset


def _parsed(content: bytes, limits: Limits, where: str, elements: ElementCount, *, pixels: bool) -> Dataset:
    stream = _CountedFile(content, elements)
    stream.seek(132)
    meta = read_header(stream, False, True, stop_when=lambda tag, vr, length: tag.group != 2)  # noqa: ARG005
    _parse_sequences(meta, elements)
    if meta.get("TransferSyntaxUID") != DeflatedExplicitVRLittleEndian:
        stream.seek(0)
        return pydicom.dcmread(stream, stop_before_pixels=not pixels, force=False)
    # pydicom would inflate it without a limit, and parse what comes out uncounted.
    inflater, body = zlib.decompressobj(-zlib.MAX_WBITS), bytearray()
    for part in inflated(inflater, [memoryview(content)[stream.tell() :]]):
        body += part
        if len(body) > limits.max_decompressed:
            raise ScanTooLarge(
                f"DICOM: {where} inflates to more than {limits.max_decompressed} bytes; send a smaller scan"
            )
    dataset = read_header(
        _CountedFile(bytes(body), elements),
        False,
        True,
        stop_when=None if pixels else lambda tag, vr, length: tag.group == _PIXELS,  # noqa: ARG005
    )
    dataset.file_meta = FileMetaDataset(meta)
    return dataset


def _parse_sequences(dataset: Dataset, elements: ElementCount) -> None:
    """Parse the sequences of defined length, which pydicom parses uncounted when they are first used.

    Lists of values are converted when they are first used, so they are counted here: texts by their
    separators, numbers by their bytes.
    """
    sequences = []
    # In the order of tags: the creator of private elements, which says their types, before them.
    for element in sorted(dataset.values(), key=lambda element: int(element.tag)):
        vr, value = element.VR, element.value
        if isinstance(element, RawDataElement) and vr in (None, VR.UN):
            found: dict[str, Any] = {}
            raw_element_vr(element, found, ds=dataset)
            vr = found["VR"]
        if vr == VR.SQ:
            sequences.append(element)
        elif isinstance(value, bytes) and element.tag != _CONTOUR_DATA:
            elements.take(value.count(b"\\") if vr in STR_VR else len(value) // 8 if vr in _NUMBERS else 0)
    for element in sequences:
        items: Any = element.value or ()
        if isinstance(element, RawDataElement):
            content = element.value or b""
            items = read_sequence(
                _CountedFile(content, elements),
                element.is_implicit_VR,
                element.is_little_endian,
                len(content),
                dataset.original_character_set,
            )
            dataset[element.tag] = DataElement(element.tag, VR.SQ, items)
        for item in items:
            _parse_sequences(item, elements)
