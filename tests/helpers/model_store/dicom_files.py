"""Write DICOM files: a series on any affine, an enhanced multi-frame file, a single image, a SEG."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import highdicom as hd
import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset, FileMetaDataset, dcmread
from pydicom.sequence import Sequence as Items
from pydicom.sr.codedict import codes
from pydicom.uid import (
    CTImageStorage,
    DigitalXRayImageStorageForPresentation,
    EnhancedMRImageStorage,
    ExplicitVRLittleEndian,
    NuclearMedicineImageStorage,
    RTStructureSetStorage,
    generate_uid,
)

# Row and column cosines in LPS by plane; the patient lies in another position where they are turned.
PLANES: dict[str, tuple[float, ...]] = {
    "axial": (1, 0, 0, 0, 1, 0),
    "sagittal": (0, 1, 0, 0, 0, -1),
    "coronal": (1, 0, 0, 0, 0, -1),
    "axial feet first": (-1, 0, 0, 0, 1, 0),
    "axial prone": (-1, 0, 0, 0, -1, 0),
    "axial feet first prone": (1, 0, 0, 0, -1, 0),
    "axial on the right side": (0, 1, 0, -1, 0, 0),
    "axial on the left side": (0, -1, 0, 1, 0, 0),
}


def turned(degrees: float = 25.0) -> tuple[float, ...]:
    """An oblique plane: axial, turned about two axes."""
    a = np.radians(degrees)
    about_x = np.array([[1, 0, 0], [0, np.cos(a), -np.sin(a)], [0, np.sin(a), np.cos(a)]])
    about_z = np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]])
    both = about_z @ about_x
    return tuple(float(f"{x:.9f}") for x in (*both[:, 0], *both[:, 1]))


def uid(*of: object) -> str:
    return str(generate_uid(entropy_srcs=[repr(of)]))


def header(pixels: NDArray[Any], sop_class: str, number: int = 0, **values: Any) -> Dataset:
    """A data set of an image [..., rows, columns] or, with samples, [rows, columns, 3]."""
    colour = values.get("SamplesPerPixel", 1) == 3
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = sop_class
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = uid(sop_class, number)
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = uid("study"), uid("series")
    dataset.FrameOfReferenceUID = uid("frame of reference")
    dataset.PatientName, dataset.PatientID = "Planted^Patient", "PLANTED-ID"
    dataset.PatientBirthDate, dataset.PatientSex, dataset.AccessionNumber = "19610203", "O", ""
    dataset.StudyDate, dataset.StudyTime, dataset.StudyID = "20110405", "060708", "1"
    dataset.ReferringPhysicianName, dataset.PositionReferenceIndicator = "", ""
    dataset.Modality, dataset.Manufacturer = "CT", "Locum tests"
    dataset.SeriesNumber, dataset.InstanceNumber = 1, number + 1
    dataset.Rows, dataset.Columns = pixels.shape[:2] if colour else pixels.shape[-2:]
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    bits = 8 * pixels.dtype.itemsize
    dataset.BitsAllocated = dataset.BitsStored = bits
    dataset.HighBit, dataset.PixelRepresentation = bits - 1, int(pixels.dtype.kind == "i")
    dataset.PixelData = pixels.tobytes()
    for keyword, value in values.items():
        setattr(dataset, keyword, value)
    dataset.HighBit = values.get("HighBit", dataset.BitsStored - 1)
    return dataset


def written(dataset: Dataset) -> bytes:
    content = io.BytesIO()
    dataset.save_as(content, enforce_file_format=True)
    return content.getvalue()


def series(
    volume: NDArray[Any],
    plane: Sequence[float] = PLANES["axial"],
    spacing: tuple[float, float] = (0.8, 0.7),
    gap: float = 2.5,
    origin: tuple[float, float, float] = (-31.0, 12.5, 40.0),
    change: Callable[[Dataset, int], None] | None = None,
    **values: Any,
) -> dict[str, bytes]:
    """[slices, rows, columns] to files that are named, numbered and ordered against their positions."""
    normal = np.cross(plane[:3], plane[3:])
    files = {}
    for place, pixels in enumerate(volume):
        number = len(volume) - 1 - place
        dataset = header(pixels, CTImageStorage, number)
        dataset.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
        dataset.ImageOrientationPatient = list(plane)
        dataset.ImagePositionPatient = [round(float(x), 6) for x in np.array(origin) + place * gap * normal]
        dataset.PixelSpacing, dataset.SliceThickness = list(spacing), 1.0
        # Wrong on purpose: the header's spacing is not to be trusted.
        dataset.SpacingBetweenSlices = 99.0
        dataset.RescaleSlope, dataset.RescaleIntercept = 1, 0
        for keyword, value in values.items():
            setattr(dataset, keyword, value)
        if change is not None:
            change(dataset, place)
        files[f"{number:04d}.dcm"] = written(dataset)
    return files


def tilted(volume: NDArray[Any], degrees: float, gap: float = 2.5, **values: Any) -> dict[str, bytes]:
    """[slices, rows, columns] of a gantry that is tilted about the left-right axis."""
    a = np.radians(degrees)
    plane = (1.0, 0.0, 0.0, 0.0, round(float(np.cos(a)), 9), round(float(-np.sin(a)), 9))

    def along_the_table(dataset: Dataset, place: int) -> None:
        dataset.ImagePositionPatient = [-31.0, 12.5, 40.0 + gap * place]

    return series(volume, plane, change=along_the_table, **values)


def enhanced(volume: NDArray[Any], gap: float = 2.5, *, own_groups: bool = False, **values: Any) -> bytes:
    """[slices, rows, columns] as one enhanced file, its frames from the top down.

    With `own_groups`, orientation and spacing are with each frame, as some scanners write them.
    """
    dataset = header(volume[::-1], EnhancedMRImageStorage, NumberOfFrames=len(volume), Modality="MR")
    plane, measures = Dataset(), Dataset()
    plane.ImageOrientationPatient = list(PLANES["axial"])
    measures.PixelSpacing, measures.SliceThickness = [0.8, 0.7], 1.0
    shared = Dataset()
    if not own_groups:
        shared.PlaneOrientationSequence, shared.PixelMeasuresSequence = Items([plane]), Items([measures])
    dataset.SharedFunctionalGroupsSequence = Items([shared])
    items = []
    for place in reversed(range(len(volume))):
        position, frame = Dataset(), Dataset()
        position.ImagePositionPatient = [-31.0, 12.5, 40.0 + gap * place]
        frame.PlanePositionSequence = Items([position])
        if own_groups:
            frame.PlaneOrientationSequence, frame.PixelMeasuresSequence = Items([plane]), Items([measures])
        items.append(frame)
    dataset.PerFrameFunctionalGroupsSequence = Items(items)
    for keyword, value in values.items():
        setattr(dataset, keyword, value)
    return written(dataset)


def reconstruction(volume: NDArray[Any], gap: float = -2.5, **values: Any) -> bytes:
    """[slices, rows, columns] as reconstructed slices of nuclear medicine.

    The place of the first slice is with the detector. For a negative gap it is the topmost.
    """
    frames = volume[::-1] if gap < 0 else volume
    dataset = header(frames.astype(np.uint16), NuclearMedicineImageStorage, Modality="NM")
    dataset.NumberOfFrames, dataset.ImageType = len(frames), ["DERIVED", "PRIMARY", "RECON TOMO", "EMISSION"]
    dataset.PixelSpacing, dataset.SpacingBetweenSlices, dataset.SliceThickness = [0.8, 0.7], gap, abs(gap)
    dataset.FrameIncrementPointer, dataset.NumberOfSlices = 0x00540080, len(frames)
    dataset.SliceVector = [*range(1, len(frames) + 1)]
    detector = Dataset()
    detector.ImagePositionPatient = [-31.0, 12.5, 40.0 + (abs(gap) * (len(frames) - 1) if gap < 0 else 0)]
    detector.ImageOrientationPatient = list(PLANES["axial"])
    dataset.DetectorInformationSequence = Items([detector])
    for keyword, value in values.items():
        setattr(dataset, keyword, value)
    return written(dataset)


def image(pixels: NDArray[Any], **values: Any) -> bytes:
    """One projection image, without a position."""
    return written(header(pixels, DigitalXRayImageStorageForPresentation, Modality="DX", **values))


def seg(files: dict[str, bytes], drawn: NDArray[np.uint8], kind: str) -> bytes:
    """A SEG by highdicom, without the empty planes."""
    sources = sorted((dcmread(io.BytesIO(f)) for f in files.values()), key=lambda d: -d.InstanceNumber)
    segments = [
        hd.seg.SegmentDescription(n, f"s{n}", codes.SCT.Organ, codes.SCT.Liver, "MANUAL")
        for n in range(1, int(drawn.max()) + 1)
    ]
    made = hd.seg.Segmentation(
        sources, drawn, kind, segments, uid("s"), 1, uid("i"), 1, "m", "n", "1", "2", omit_empty_frames=True
    )
    return written(made)


def zipped(files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def squares(files: dict[str, bytes], drawn: NDArray[np.bool_]) -> list[tuple[str, list[list[float]]]]:
    """A contour around each pixel of a mask [slices, rows, columns] of a `series`, in mm, LPS."""
    found = []
    sources = sorted((dcmread(io.BytesIO(f)) for f in files.values()), key=lambda d: -d.InstanceNumber)
    for source, plane in zip(sources, drawn, strict=True):
        down, right = (float(side) for side in source.PixelSpacing)
        steps = np.array(source.ImageOrientationPatient, float).reshape(2, 3) * [[right], [down]]
        for row, column in np.argwhere(plane):
            ends = [(column + x, row + y) for x, y in ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5))]
            points = np.array(source.ImagePositionPatient, float) + np.array(ends) @ steps
            found.append(("CLOSED_PLANAR", points.tolist()))
    return found


def rtstruct(
    files: dict[str, bytes],
    rois: dict[str, Sequence[tuple[str, Sequence[Sequence[float]]]]],
    codes: dict[str, tuple[str, str]] | None = None,
    change: Callable[[Dataset], None] | None = None,
    first: int = 301,
) -> bytes:
    """An RTSTRUCT on a series: for each ROI its contours, as type and points in mm, LPS.

    ROIs are numbered from `first` on, which by default is no value of any mask.
    """
    sources = [dcmread(io.BytesIO(file), stop_before_pixels=True) for file in files.values()]
    one_of, made = sources[0], Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = made.SOPClassUID = RTStructureSetStorage
    made.file_meta.MediaStorageSOPInstanceUID = made.SOPInstanceUID = uid("structures")
    made.StudyInstanceUID, made.SeriesInstanceUID, made.Modality = (
        one_of.StudyInstanceUID,
        uid("rs"),
        "RTSTRUCT",
    )
    frame, study, one = Dataset(), Dataset(), Dataset()
    one.SeriesInstanceUID = one_of.SeriesInstanceUID
    study.RTReferencedSeriesSequence, frame.RTReferencedStudySequence = Items([one]), Items([study])
    frame.FrameOfReferenceUID = one_of.FrameOfReferenceUID
    made.ReferencedFrameOfReferenceSequence = Items([frame])
    made.StructureSetROISequence, made.ROIContourSequence = Items([]), Items([])
    made.RTROIObservationsSequence = Items([])
    for number, (name, contours) in enumerate(rois.items(), start=first):
        roi, drawn, observed = Dataset(), Dataset(), Dataset()
        roi.ROINumber, roi.ROIName = number, name
        roi.ReferencedFrameOfReferenceUID = one_of.FrameOfReferenceUID
        drawn.ReferencedROINumber = observed.ReferencedROINumber = number
        drawn.ContourSequence = Items([])
        for kind, points in contours:
            item = Dataset()
            item.ContourGeometricType, item.NumberOfContourPoints = kind, len(points)
            item.ContourData = [f"{value:.4f}" for point in points for value in point]
            drawn.ContourSequence.append(item)
        if name in (codes or {}):
            code = Dataset()
            code.CodeValue, code.CodingSchemeDesignator = codes[name]  # type: ignore[index]
            observed.RTROIIdentificationCodeSequence = Items([code])
        made.StructureSetROISequence.append(roi)
        made.ROIContourSequence.append(drawn)
        made.RTROIObservationsSequence.append(observed)
    if change is not None:
        change(made)
    return written(made)
