"""DICOM files to a Scan: the reader behind `model_store.scan.decode`.

series = open_series(data, limits)      # headers alone, in slice order
scan = series.scan()                    # [columns, rows, slices, C] with its affine, or [rows, columns, C]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.uid import UID

from model_store.errors import ScanTooLarge, UnsupportedScan
from model_store.scans.dicom import geometry
from model_store.scans.dicom.files import (
    ZIP,
    Content,
    ElementCount,
    contents_of_parts,
    contents_of_zip,
    read_dataset,
    reported,
)
from model_store.scans.dicom.geometry import Frame
from model_store.scans.dicom.masks import SEG_CLASSES
from model_store.scans.dicom.pixels import LOSSY, Layout, decode_frames, layout_of
from model_store.scans.foreign import is_dicom
from model_store.scans.types import Limits, Note, Parts, Scan, check_finite, check_sides


def read_dicom(data: bytes, limits: Limits) -> Scan:
    """Read one DICOM file or a zip of a series. Raises DamagedScan, UnsupportedScan, ScanTooLarge."""
    return open_series(data, limits).scan()


def read_series(parts: Parts, limits: Limits) -> Scan:
    """Read the files of a series. Raises DamagedScan, UnsupportedScan, ScanTooLarge."""
    return open_series(parts, limits).scan()


@dataclass(frozen=True)
class DicomSeries:
    """The headers of one volume or image, and how its frames are stacked.

    Attributes:
        headers: of each file, without pixels.
        frames: in slice order.
        affine: [4, 4] voxel (column, row, slice) -> RAS in mm; None for an image.
        notes: remarks on how it was read.
        load: parse a file again, with its pixels.
    """

    headers: tuple[Dataset, ...]
    frames: tuple[Frame, ...]
    affine: NDArray[np.float64] | None
    notes: tuple[Note, ...]
    _layouts: tuple[Layout, ...]
    load: Callable[[int], Dataset]

    def scan(self) -> Scan:
        """Decode the pixels, file by file. Raises DamagedScan, UnsupportedScan."""
        first = self._layouts[0]
        places = {(frame.file, frame.index): place for place, frame in enumerate(self.frames)}
        voxels: NDArray[Any] | None = None
        for file, layout in enumerate(self._layouts):
            decoded = decode_frames(self.load(file), layout, _where(file, len(self.headers)))
            for index, values in enumerate(decoded):
                if voxels is None:
                    voxels = np.empty((len(self.frames), *values.shape), values.dtype.newbyteorder("="))
                elif values.dtype.newbyteorder("=") != voxels.dtype:
                    raise UnsupportedScan(
                        f"DICOM: expected samples of one type, found {voxels.dtype} and {values.dtype}; send "
                        "one series"
                    )
                voxels[places[file, index]] = values
        assert voxels is not None
        if self.affine is None and first.photometric == "MONOCHROME1":
            # White is stored as zero. A volume keeps its values, since they measure something.
            if self.headers[0].get("ModalityLUTSequence"):
                highest = int(np.iinfo(voxels.dtype).max)
            else:
                highest = -1 if first.signed else 2**first.stored - 1
            voxels = highest - voxels
        voxels = _rescaled(voxels, self.frames)
        check_finite(voxels, "DICOM")
        shown = voxels[0] if self.affine is None else voxels.transpose(2, 1, 0, 3)
        shown.flags.writeable = False
        with reported("the Modality"):
            modality = str(self.headers[0].get("Modality") or "") or None
        return Scan(shown, self.affine, "dicom", notes=self.notes, modality=modality)


def open_series(content: bytes | Parts, limits: Limits) -> DicomSeries:
    """Read the headers, and check that they are one volume or image within the limits.

    Raises:
        UnsupportedScan: no regular stack of slices, several series, or a transfer syntax without decoder.
        DamagedScan: a file that cannot be parsed. ScanTooLarge: beyond `limits`.
    """
    contents, others = _contents(content, limits)
    if not contents:
        raise UnsupportedScan(f"DICOM: none of the {others} files is a DICOM file with its file header")
    total = len(contents)

    def load(file: int, *, pixels: bool, elements: ElementCount | None = None) -> Dataset:
        return read_dataset(contents[file](), limits, _where(file, total), pixels=pixels, elements=elements)

    elements = ElementCount()
    headers = [load(file, pixels=False, elements=elements) for file in range(total)]
    kept = [file for file, header in enumerate(headers) if "Rows" in header]
    with reported("the header"):
        if not kept:
            layout_of(headers[0], _where(0, total))  # says what it is in place of an image
        headers = [headers[file] for file in kept]
        kept = [file for file, header in zip(kept, headers, strict=True) if not _is_seg(header)]
        if not kept:
            raise UnsupportedScan("DICOM: this is a segmentation, and no scan; send the images")
        headers = [header for header in headers if not _is_seg(header)]
        _check_one_series(headers)
        layouts = [layout_of(header, _where(file, total)) for file, header in zip(kept, headers, strict=True)]
        _check_limits(layouts, limits)
        frames = [f for file, header in enumerate(headers) for f in geometry.frames_of(file, header)]
        order, affine, notes = _arranged(frames)
        skipped = others + total - len(kept)
        if skipped:
            notes = (*notes, Note("files-ignored", f"{skipped} files without an image were left out"))
        if any(layout.syntax in LOSSY for layout in layouts) or _was_lossy(headers[0]):
            notes = (*notes, Note("lossy-pixels", "the pixels were compressed with loss"))
        if str(headers[0].get("BurnedInAnnotation") or "").upper() == "YES":
            text = "the image has burnt-in text (by its header), which may name the patient"
            notes = (*notes, Note("burnt-in-text", text))
    return DicomSeries(
        tuple(headers),
        tuple(frames[i] for i in order),
        affine,
        notes,
        tuple(layouts),
        lambda file: load(kept[file], pixels=True),
    )


def _contents(content: bytes | Parts, limits: Limits) -> tuple[list[Content], int]:
    if not isinstance(content, bytes):
        return contents_of_parts(content)
    if content.startswith(ZIP) and not is_dicom(content):
        return contents_of_zip(content, limits)
    return [lambda: content], 0


def _is_seg(header: Dataset) -> bool:
    return str(header.get("SOPClassUID")) in SEG_CLASSES


def _where(file: int, total: int) -> str:
    return "the file" if total == 1 else f"file {file + 1} of {total}"


def _was_lossy(header: Dataset) -> bool:
    return str(header.get("LossyImageCompression") or "") == "01"


# Series that a refusal lists, and the planes across the patient's axes.
_MOST_LISTED = 12
_PLANES = ("sagittal", "coronal", "axial")
# All images of a series have one value of each (PS3.3 A.1.2, C.7.4.1).
_SHARED = (
    ("PatientID", "patient"),
    ("StudyInstanceUID", "study"),
    ("SeriesInstanceUID", "series"),
    ("FrameOfReferenceUID", "frame of reference"),
)


def _check_one_series(headers: Sequence[Dataset]) -> None:
    for keyword, name in _SHARED:
        found = Counter(str(header.get(keyword)) for header in headers)
        if len(found) > 1 and keyword == "SeriesInstanceUID":
            raise UnsupportedScan(
                f"DICOM: expected one series, found {len(found)}: {_listed(headers)}; send the files of one, "
                "or for a model of several channels each by its channel (scan.CHANNEL)"
            )
        if len(found) > 1:
            sizes = ", ".join(str(number) for _, number in found.most_common(8))
            raise UnsupportedScan(
                f"DICOM: expected one {name}, found {len(found)} with {sizes} images; send one series at a "
                "time, or for a model of several channels each by its channel (scan.CHANNEL)"
            )
    classes = {str(header.get("SOPClassUID")) for header in headers}
    if len(classes) > 1:
        names = ", ".join(sorted(UID(name).name[:48] for name in classes if UID(name).type == "SOP Class"))
        raise UnsupportedScan(f"DICOM: expected images of one kind, found {len(classes)} ({names}); send one")
    if any("MOSAIC" in (header.get("ImageType") or ()) for header in headers):
        raise UnsupportedScan(
            "DICOM: the slices are tiled into one picture (a Siemens mosaic); convert it with dcm2niix"
        )


def _listed(headers: Sequence[Dataset]) -> str:
    """The series by number and what they are, with the numbers of their images.

    Not by their descriptions, which people write and may name a patient in (PS3.15 E.1).
    """
    images = Counter(str(header.get("SeriesInstanceUID")) for header in headers)
    first = {str(header.get("SeriesInstanceUID")): header for header in reversed(headers)}
    known = sorted(images, key=lambda uid: (_number_of(first[uid]), uid))
    said = [f"number {_number_of(first[uid])} ({_described(first[uid], images[uid])})" for uid in known]
    more = len(said) - _MOST_LISTED
    return ", ".join(said[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _described(header: Dataset, images: int) -> str:
    kind = str(header.get("Modality") or "")
    parts = [kind] if kind.isalpha() and kind.isupper() else []
    with suppress(TypeError, ValueError, IndexError):
        row, column = np.array(header.ImageOrientationPatient, float).reshape(2, 3)
        parts.append(_PLANES[int(np.abs(np.cross(row, column)).argmax())])
    number = "1 image" if images == 1 else f"{images} images"
    return ", ".join([*parts, f"{number} of {int(header.Rows)} x {int(header.get('Columns') or 0)}"])


def _number_of(header: Dataset) -> int:
    with suppress(TypeError, ValueError):
        return int(header.get("SeriesNumber"))
    return 0


def _check_limits(layouts: Sequence[Layout], limits: Limits) -> None:
    first = layouts[0]
    for layout in layouts:
        if (layout.rows, layout.columns) != (first.rows, first.columns):
            raise UnsupportedScan(
                f"DICOM: expected images of one size, found {first.rows} x {first.columns} and {layout.rows} "
                f"x {layout.columns}; send one series"
            )
        # The same samples mean the same: grey with colour or signed with unsigned are not one series.
        if (layout.samples, layout.photometric) != (first.samples, first.photometric):
            raise UnsupportedScan(
                "DICOM: the images have different photometric interpretations; send one series"
            )
    check_sides(first.columns, first.rows, limits, "DICOM")
    frames = sum(layout.frames for layout in layouts)
    voxels = frames * first.rows * first.columns
    if voxels > limits.max_voxels:
        raise ScanTooLarge(
            f"DICOM: expected at most {limits.max_voxels} voxels, found {voxels} ({frames} x {first.rows} x "
            f"{first.columns}); send fewer slices"
        )
    size = sum(layout.decoded_bytes for layout in layouts)
    if size > limits.max_decompressed:
        raise ScanTooLarge(
            f"DICOM: expected at most {limits.max_decompressed} bytes of pixels, found {size}; "
            "send fewer slices"
        )


def _arranged(
    frames: Sequence[Frame],
) -> tuple[list[int], NDArray[np.float64] | None, tuple[Note, ...]]:
    if geometry.is_placed(frames):
        return geometry.stack(frames)
    if len(frames) > 1:
        raise UnsupportedScan(
            f"DICOM: {len(frames)} frames without any position in the patient; send one image at a time"
        )
    return [0], None, ()


def _rescaled(voxels: NDArray[Any], frames: Sequence[Frame]) -> NDArray[Any]:
    """Apply each frame's slope and intercept to [frames, rows, columns, C]; consumes `voxels`.

    Whole numbers stay integers, in place where the values fit.
    """
    rules = [(frame.slope, frame.intercept) for frame in frames]
    if all(rule == (1.0, 0.0) for rule in rules):
        return voxels
    if all(number.is_integer() for rule in rules for number in rule):
        ends = [
            slope * float(end) + intercept
            for frame, (slope, intercept) in zip(voxels, rules, strict=True)
            for end in (frame.min(), frame.max())
        ]
        low, high = min(ends), max(ends)
        size = voxels.dtype.itemsize
        for name in (f"u{size}", f"i{size}", "i4"):
            if np.iinfo(name).min <= low and high <= np.iinfo(name).max:
                whole = voxels.view(name) if np.dtype(name).itemsize == size else voxels.astype(name)
                for frame, (slope, intercept) in zip(whole, rules, strict=True):
                    # Modulo the type's range, in which the result fits.
                    frame[...] = (frame.astype(np.int64) * int(slope) + int(intercept)).astype(name)
                return whole
    # float32 is precise enough for a scaled 16-bit value; wider integers need float64.
    scaled = np.empty(voxels.shape, np.float32 if voxels.dtype.itemsize <= 2 else np.float64)
    for place, (slope, intercept) in enumerate(rules):
        np.multiply(voxels[place], slope, out=scaled[place], casting="unsafe")
        scaled[place] += intercept
    return scaled
