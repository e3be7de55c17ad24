"""Read a DICOM SEG as a mask: voxel values are segment numbers, 0 is no segment.

`model_store.preprocessing.by_labels` gives them the values of a task, by what each segment says that it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset

from model_store.errors import DamagedScan, ScanTooLarge, UnsupportedScan
from model_store.scans.dicom import geometry
from model_store.scans.dicom.files import read_dataset, reported
from model_store.scans.dicom.geometry import Frame
from model_store.scans.dicom.pixels import NATIVE, Layout, decode_frames, layout_of
from model_store.scans.types import Limits, Scan, Segment, check_sides

# Segmentation and Label Map Segmentation Storage.
SEG_CLASSES = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")


def is_seg(data: bytes) -> bool:
    """Whether it is a DICOM SEG, by the class in its file header."""
    return data[128:132] == b"DICM" and SEG_CLASSES[0][:-1].encode() in data[:1024]


def read_seg(data: bytes, limits: Limits) -> Scan:
    """Read a SEG of parallel frames; planes that it leaves out are empty.

    Raises UnsupportedScan for overlapping segments or partial occupancy, DamagedScan, ScanTooLarge.
    """
    header = read_dataset(data, limits, "the SEG", pixels=False)
    with reported("the header of the SEG"):
        layout = layout_of(header, "the SEG", grey=(1, 8, 16))
        rows, columns = layout.rows, layout.columns
        kind, largest = str(header.SegmentationType), int(header.get("MaximumFractionalValue") or 1)
        check_sides(columns, rows, limits, "SEG")
        if layout.frames * rows * columns > limits.max_voxels:
            raise ScanTooLarge(
                f"SEG: expected at most {limits.max_voxels} voxels, found {layout.frames} frames of {rows} x "
                f"{columns}"
            )
        frames = geometry.frames_of(0, header)
        if not geometry.is_placed(frames):
            raise UnsupportedScan("SEG: its frames have no position in the patient; send the mask as NIfTI")
        places, count, affine = geometry.place(frames)
        if count * rows * columns > limits.max_voxels:
            raise ScanTooLarge(
                f"SEG: expected at most {limits.max_voxels} voxels, found {count} x {rows} x {columns}"
            )
        numbers = [0 if kind == "LABELMAP" else _segment(frame) for frame in frames]
        dataset = read_dataset(data, limits, "the SEG", pixels=True)
    mask = np.zeros((count, rows, columns), np.uint16)
    for plane, number, place in zip(_planes(dataset, layout), numbers, places, strict=True):
        if kind == "LABELMAP":
            mask[place] = plane
            continue
        if kind == "FRACTIONAL" and ((plane != 0) & (plane != largest)).any():
            raise UnsupportedScan("SEG: voxels are occupied in part; export it as a binary segmentation")
        inside = plane != 0
        if (mask[place][inside] != 0).any():
            raise UnsupportedScan(
                f"SEG: segment {number} overlaps another one; send the mask as NIfTI, with a value for both"
            )
        mask[place][inside] = number
    voxels = mask.transpose(2, 1, 0)[..., None]
    voxels.flags.writeable = False
    return Scan(voxels, affine, "dicom-seg", segments=_named(header))


def _named(header: Dataset) -> dict[int, Segment]:
    """The name and the code of every segment, as far as they can be read."""
    found: dict[int, Segment] = {}
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        for item in header.get("SegmentSequence") or ():
            types = item.get("SegmentedPropertyTypeCodeSequence") or ()
            code = types[0] if types else Dataset()
            found[int(item.SegmentNumber)] = Segment.of(
                item.get("SegmentLabel"),
                code.get("CodeValue") or code.get("LongCodeValue"),
                code.get("CodingSchemeDesignator"),
            )
    return found


def _segment(frame: Frame) -> int:
    number: Any = frame.find("ReferencedSegmentNumber")
    if number is None or not 1 <= int(number) <= 65535:
        raise DamagedScan("SEG: a frame does not name its segment; export it again")
    return int(number)


def _planes(dataset: Dataset, layout: Layout) -> Iterator[NDArray[Any]]:
    """Yield the stored values of each frame, [rows, columns]."""
    if layout.allocated > 1:
        # The palette of a label map colours its numbers, which are wanted here.
        for values in decode_frames(dataset, replace(layout, photometric="MONOCHROME2"), "the SEG"):
            yield values[..., 0]
        return
    if layout.syntax not in NATIVE:
        raise UnsupportedScan("SEG: its bits are compressed; convert it to Explicit VR Little Endian")
    with reported("the pixels of the SEG"):
        # All at once: a frame of bits may begin within a byte, at which pydicom's iterator fails.
        pixels = dataset.pixel_array.reshape(layout.frames, layout.rows, layout.columns)
    yield from pixels
