"""DICOM files to a Scan: the reader behind `model_store.scan.decode`.

series = open_series(data, limits)      # headers alone, in slice order
scan = series.scan()                    # [columns, rows, slices, C] with its affine, or [rows, columns, C]
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.multival import MultiValue
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
    zip_of,
)
from model_store.scans.dicom.geometry import Frame
from model_store.scans.dicom.masks import SEG_CLASSES
from model_store.scans.dicom.pixels import LOSSY, Layout, decode_frames, layout_of, padding_of
from model_store.scans.foreign import is_dicom
from model_store.scans.types import (
    Acquisition,
    Limits,
    Note,
    Parts,
    Scan,
    check_finite,
    check_sides,
    printed,
)


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
        film: whether the frames follow each other in time.
    """

    headers: tuple[Dataset, ...]
    frames: tuple[Frame, ...]
    affine: NDArray[np.float64] | None
    notes: tuple[Note, ...]
    _layouts: tuple[Layout, ...]
    load: Callable[[int], Dataset]
    film: bool = False

    @property
    def gap(self) -> float | None:
        """Millimetres from slice to slice, across them; None for an image."""
        if self.affine is None:
            return None
        row, column, step = self.affine[:3, :3].T
        across = np.cross(row, column)
        return float(abs(step @ across) / np.linalg.norm(across))

    def scan(self) -> Scan:
        """Decode the pixels, file by file. Raises DamagedScan, UnsupportedScan."""
        first = self._layouts[0]
        places = {(frame.file, frame.index): place for place, frame in enumerate(self.frames)}
        voxels: NDArray[Any] | None = None
        padded: NDArray[np.bool_] | None = None
        for file, layout in enumerate(self._layouts):
            decoded = decode_frames(self.load(file), layout, _where(file, len(self.headers)))
            with reported("the PixelPaddingValue"):
                padding = padding_of(self.headers[file], layout)
            for index, values in enumerate(decoded):
                if voxels is None:
                    voxels = np.empty((len(self.frames), *values.shape), values.dtype.newbyteorder("="))
                elif values.dtype.newbyteorder("=") != voxels.dtype:
                    raise UnsupportedScan(
                        f"DICOM: expected samples of one type, found {voxels.dtype} and {values.dtype}; send "
                        "one series"
                    )
                voxels[places[file, index]] = values
                if padding is not None and (found := _between(values, *padding)).any():
                    padded = np.zeros(voxels.shape, bool) if padded is None else padded
                    padded[places[file, index]] = found
        assert voxels is not None
        if self.affine is None and first.photometric == "MONOCHROME1":
            # White is stored as zero. A volume keeps its values, since they measure something.
            if self.headers[0].get("ModalityLUTSequence"):
                highest = int(np.iinfo(voxels.dtype).max)
            else:
                highest = -1 if first.signed else 2**first.stored - 1
            voxels = highest - voxels
        voxels = _rescaled(voxels, self.frames)
        notes = self.notes
        # The highest of a volume in MONOCHROME1 are dark.
        bright = self.affine is not None and first.photometric == "MONOCHROME1"
        if padded is not None and _fill(voxels, padded, highest=bright, keeps_zero=self.affine is not None):
            notes = (*notes, _PADDED)
        check_finite(voxels, "DICOM")
        shown = voxels[0] if self.affine is None else voxels.transpose(2, 1, 0, 3)
        shown.flags.writeable = False
        with reported("the Modality or FrameOfReferenceUID"):
            modality = str(self.headers[0].get("Modality") or "") or None
            frame_of_reference = printed(self.headers[0].get("FrameOfReferenceUID"))
        return Scan(
            shown,
            self.affine,
            "dicom",
            notes=notes,
            modality=modality,
            acquisition=_acquisition(self.headers[0]),
            frame_of_reference=frame_of_reference,
            film=self.film,
        )


def _between(values: NDArray[Any], low: int, high: int) -> NDArray[np.bool_]:
    return np.asarray((values >= low) & (values <= high))


def _fill(voxels: NDArray[Any], padded: NDArray[np.bool_], *, highest: bool, keeps_zero: bool) -> bool:
    """Give padding the lowest (or `highest`) of the other intensities; return whether it did.

    Where padding is among the other intensities, compression with loss has moved it, or the header is wrong:
    then nothing is changed. A padding of zero stays in volumes, where it means that nothing was measured.
    """
    lowest, most = voxels.min(), voxels.max()
    others = ~padded
    low, high = voxels.min(where=others, initial=most), voxels.max(where=others, initial=lowest)
    below = voxels.max(where=padded, initial=lowest) < low
    above = voxels.min(where=padded, initial=most) > high
    if padded.all() or not (below or above) or (keeps_zero and not voxels.any(where=padded)):
        return False
    voxels[padded] = high if highest else low
    return True


def _acquisition(header: Dataset) -> Acquisition:
    """How a series was acquired; an element that cannot be read says nothing."""

    def said(*keywords: str) -> str:
        for keyword in keywords:
            # pydicom raises a dozen unrelated types for elements that are not what they should be.
            with suppress(Exception):
                found = header.get(keyword)
                several = found if isinstance(found, MultiValue) else [found]
                if text := printed("\\".join(str(each) for each in several if each)):
                    return text
        return ""

    thickness = None
    with suppress(ValueError):
        thickness = float(said("SliceThickness"))
    return Acquisition(
        maker=said("Manufacturer"),
        model=said("ManufacturerModelName"),
        software=said("SoftwareVersions"),
        station=said("StationName"),
        kernel=said("ConvolutionKernel", "SequenceName", "ScanningSequence"),
        slice_mm=thickness if thickness is not None and 0 < thickness < math.inf else None,
        series=said("SeriesInstanceUID"),
    )


def open_series(content: bytes | Parts, limits: Limits) -> DicomSeries:
    """Read the headers, and check that they are one volume or image within the limits.

    Raises:
        UnsupportedScan: no regular stack of slices, several series, or a transfer syntax without decoder.
        DamagedScan: a file that cannot be parsed. ScanTooLarge: beyond `limits`.
    """
    images = _images(content, limits)
    with reported("the header"):
        kept, localizers = _choose(images.headers, None)
        headers, files = [images.headers[each] for each in kept], [images.files[each] for each in kept]
        _check_one_series(headers)
        layouts = [layout_of(header, images.where(file)) for file, header in zip(files, headers, strict=True)]
        _check_limits(layouts, limits)
        frames = [f for file, header in enumerate(headers) for f in geometry.frames_of(file, header)]
        film = len(headers) == 1 and geometry.is_film(headers[0])
        order, affine, notes = geometry.film(frames) if film else _arranged(frames)
        ignored = [f"{images.others} files without an image were left out"] * bool(images.others)
        if localizers:
            ignored.append(f"localizers were left out: {_listed(localizers)}")
        if ignored:
            notes = (*notes, Note("files-ignored", "; ".join(ignored)))
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
        lambda file: images.load(files[file], pixels=True),
        film,
    )


def choose_series(content: bytes, series: str, limits: Limits) -> bytes:
    """The files of one series of a zip of DICOM files, as a stored zip, or as the file if it is one.

    `series` is its number, its UID, or the end of its UID from a dot on. A file or zip without another
    series is returned as it is.

    Raises:
        UnsupportedScan: no series or several are named so; it lists those that are there.
        DamagedScan: a file that cannot be parsed. ScanTooLarge: beyond `limits`.
    """
    images = _images(content, limits)
    with reported("the header"):
        kept, _ = _choose(images.headers, series)
    if len(kept) == len(images.headers):
        return content
    files = [images.contents[images.files[each]] for each in kept]
    return files[0]() if len(files) == 1 else zip_of(file() for file in files)


@dataclass(frozen=True)
class _Images:
    """The images among the files of an upload.

    Attributes:
        contents: of each file that is DICOM, to be read when called.
        headers: of each image.
        files: the place of each image in `contents`.
        others: how many files are no image.
    """

    contents: list[Content]
    headers: list[Dataset]
    files: list[int]
    others: int
    limits: Limits

    def where(self, file: int) -> str:
        """The name of a file in an error."""
        return _where(file, len(self.contents))

    def load(self, file: int, *, pixels: bool, elements: ElementCount | None = None) -> Dataset:
        """Parse a file."""
        return read_dataset(
            self.contents[file](), self.limits, self.where(file), pixels=pixels, elements=elements
        )


def _images(content: bytes | Parts, limits: Limits) -> _Images:
    contents, others = _contents(content, limits)
    if not contents:
        raise UnsupportedScan(f"DICOM: none of the {others} files is a DICOM file with its file header")
    images = _Images(contents, [], [], others, limits)
    elements = ElementCount()
    headers = [images.load(file, pixels=False, elements=elements) for file in range(len(contents))]
    kept = [file for file, header in enumerate(headers) if "Rows" in header]
    with reported("the header"):
        if not kept:
            layout_of(headers[0], images.where(0))  # says what it is in place of an image
        kept = [file for file in kept if not _is_seg(headers[file])]
    if not kept:
        raise UnsupportedScan("DICOM: this is a segmentation, and no scan; send the images")
    others += len(contents) - len(kept)
    return replace(images, headers=[headers[file] for file in kept], files=kept, others=others)


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


_PADDED = Note(
    "padding-replaced",
    "pixels that the header calls padding, outside of what was measured, have the intensity of the darkest "
    "of the others",
)
# Series that a list has at most, and the planes across the patient's axes.
_MOST_LISTED = 20
_PLANES = ("sagittal", "coronal", "axial")
# All images of a series have one value of each (PS3.3 A.1.2, C.7.4.1).
_SHARED = (("StudyInstanceUID", "study"), ("FrameOfReferenceUID", "frame of reference"))
_BY_CHANNEL = "for a model of several channels send each by its channel (scan.CHANNEL)"
# What a list quotes of a Series Description, which people write and may name a patient in (PS3.15 E.3.6):
# words of sequences, reconstructions, planes, times and parts of the body, and b-values and thicknesses.
_WORDS = re.compile(
    r"\b(?:"
    "t1|t1w|t2|t2w|pd|pdw|flair|dwi|adc|swi|swan|stir|dti|asl|bold|dce|dsc|fiesta|ciss|cube|tse|fse|se|"
    "gre|epi|mprage|bravo|vibe|lava|dixon|water|fat|tof|mra|mrcp|mip|minip|mpr|ct|cta|mr|mri|pet|pt|us|"
    "ac|nac|suv|2d|3d|iso|fs|sat|recon|reformat|scout|localizer|localiser|topogram|surview|survey|thin|"
    "thick|slice|soft|tissue|bone|lung|sharp|smooth|standard|std|kernel|lowdose|axial|ax|tra|transverse|"
    "sagittal|sag|coronal|cor|oblique|obl|pre|post|plain|native|contrast|km|gd|ce|with|without|arterial|"
    "venous|portal|delayed|late|early|phase|map|perfusion|diffusion|head|brain|neck|spine|chest|thorax|"
    "abdomen|pelvis|liver|kidney|prostate|breast|heart|cardiac|knee|hip|shoulder|wholebody"
    r"|b[0-9]{1,4}|[0-9]{1,2}(?:[.][0-9]{1,2})?mm)\b",
    re.IGNORECASE | re.ASCII,
)
_MOST_WORDS = 8


def _choose(headers: Sequence[Dataset], series: str | None) -> tuple[list[int], list[Dataset]]:
    """The places of the images of one series, and the headers of localizers that are left out for it.

    Without `series` it is the only one, or the only one that is no localizer and has several images. Raises
    UnsupportedScan with a list of the series, and for images of several patients.
    """
    _check_one(headers, "PatientID", "patient")
    found: dict[str, list[int]] = {}
    for place, header in enumerate(headers):
        found.setdefault(str(header.get("SeriesInstanceUID")), []).append(place)
    if series is None:
        named = [uid for uid, places in found.items() if not all(_is_localizer(headers[at]) for at in places)]
        several = len(named) == 1 and _count_images([headers[at] for at in found[named[0]]]) > 1
        if len(found) > 1 and not several:
            raise UnsupportedScan(
                f"DICOM: expected one series, found {len(found)}: {_listed(headers)}; choose one by the "
                f"option `series`, or send the files of one; {_BY_CHANNEL}"
            )
        kept = next(iter(found)) if len(found) == 1 else named[0]
    else:
        named = [uid for uid, places in found.items() if _is_named(series, uid, headers[places[0]])]
        if len(named) != 1:
            # A UID is not repeated.
            what = f"number {int(series)}" if series.isdigit() else "this UID"
            raise UnsupportedScan(
                f"DICOM: expected one series with {what} by the option `series`, found {len(named)} among "
                f"{len(found)}: {_listed(headers)}; name one by its number, or by its Series Instance UID or "
                "the end of it"
            )
        kept = named[0]
    taken = set(found[kept])
    return found[kept], [header for place, header in enumerate(headers) if place not in taken]


def _is_named(series: str, uid: str, header: Dataset) -> bool:
    if series.isdigit():
        return _number_of(header) == int(series)
    return uid == series or uid.endswith(f".{series.removeprefix('.')}")


def _is_localizer(header: Dataset) -> bool:
    return "LOCALIZER" in (header.get("ImageType") or ())


def _count_images(headers: Sequence[Dataset]) -> int:
    return sum(int(header.get("NumberOfFrames") or 1) for header in headers)


def _check_one(headers: Sequence[Dataset], keyword: str, name: str) -> None:
    found = Counter(str(header.get(keyword)) for header in headers)
    if len(found) > 1:
        sizes = ", ".join(str(number) for _, number in found.most_common(8))
        raise UnsupportedScan(
            f"DICOM: expected one {name}, found {len(found)} with {sizes} images; send one series at a time; "
            f"{_BY_CHANNEL}"
        )


def _check_one_series(headers: Sequence[Dataset]) -> None:
    for keyword, name in _SHARED:
        _check_one(headers, keyword, name)
    classes = {str(header.get("SOPClassUID")) for header in headers}
    if len(classes) > 1:
        names = ", ".join(sorted(UID(name).name[:48] for name in classes if UID(name).type == "SOP Class"))
        raise UnsupportedScan(f"DICOM: expected images of one kind, found {len(classes)} ({names}); send one")
    if any("MOSAIC" in (header.get("ImageType") or ()) for header in headers):
        raise UnsupportedScan(
            "DICOM: the slices are tiled into one picture (a Siemens mosaic); convert it with dcm2niix"
        )


def _listed(headers: Sequence[Dataset]) -> str:
    """The series by number and what they are, with the numbers of their images: at most `_MOST_LISTED`.

    Without UIDs, and of their descriptions the words that cannot name a patient.
    """
    of_series: dict[str, list[Dataset]] = {}
    for header in headers:
        of_series.setdefault(str(header.get("SeriesInstanceUID")), []).append(header)
    known = sorted(of_series.items(), key=lambda each: (_number_of(each[1][0]) or 0, each[0]))
    said = [_described(own) for _, own in known[:_MOST_LISTED]]
    more = len(known) - len(said)
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


def _described(headers: Sequence[Dataset]) -> str:
    first = headers[0]
    number, kind = _number_of(first), str(first.get("Modality") or "")
    parts = [kind[:16]] if kind.isascii() and kind.isalpha() and kind.isupper() else []
    if words := _words(str(first.get("SeriesDescription") or "")):
        parts.append(f"'{words}'")
    if all(map(_is_localizer, headers)):
        parts.append("localizer")
    with suppress(TypeError, ValueError, IndexError):
        row, column = np.array(first.ImageOrientationPatient, float).reshape(2, 3)
        parts.append(_PLANES[int(np.abs(np.cross(row, column)).argmax())])
    images = _count_images(headers)
    size = f"{int(first.Rows)} x {int(first.get('Columns') or 0)}"
    parts.append(f"{images} image{'' if images == 1 else 's'} of {size}")
    return f"{'without a number' if number is None else f'number {number}'} ({', '.join(parts)})"


def _words(description: str) -> str:
    """The words of a Series Description that are of the vocabulary, as they are written."""
    return " ".join(_WORDS.findall(description[:128].replace("_", " "))[:_MOST_WORDS])


def _number_of(header: Dataset) -> int | None:
    with suppress(TypeError, ValueError):
        number = int(header.get("SeriesNumber"))
        # IS has at most 12 characters (PS3.5 6.2).
        return number if abs(number) < 10**12 else None
    return None


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
