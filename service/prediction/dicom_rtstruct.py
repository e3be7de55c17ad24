"""Encode a segmentation as an RTSTRUCT: closed contours on the slices of its source series.

A label is an ROI. A label that is nowhere is an ROI without contours. The contours are those of
`model_store.scans.dicom.contours`; without a tolerance they give the mask back voxel for voxel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.dataelem import DataElement
from pydicom.sequence import Sequence as Items
from pydicom.tag import Tag
from pydicom.uid import ImplicitVRLittleEndian, RTStructureSetStorage

from model_store.errors import ScanTooLarge
from model_store.scan import DicomSeries
from model_store.scans.dicom.contours import INSET, count_points, outlines
from model_store.scans.dicom.structures import MOST_CONTOURS, MOST_POINTS
from model_store.task import Task
from service.about import NOTICE
from service.prediction.dicom_instance import (
    MANUFACTURER,
    SERIES_NUMBER,
    check_identifiers,
    code_of,
    equipment_of,
    instance_key,
    supported,
    uid,
    without_clock,
    written,
)
from service.prediction.dicom_seg import segments_of
from service.prediction.dicom_source import sources_of
from service.prediction.overlay import colour_of
from service.prediction.receipt import Receipt

# Points of the pixels' edges, of which a tolerance may leave most out.
_MOST_TRACED = 5 * MOST_POINTS
_TO_LPS = np.array([-1.0, -1.0, 1.0])
_CONTOUR_DATA = Tag("ContourData")
# Detached Study Management: retired, and still what an RTSTRUCT names its study by.
_STUDY_CLASS = "1.2.840.10008.3.1.2.3.1"
_STUDY = {
    "patient_id": "PatientID",
    "patient_name": "PatientName",
    "patient_birth_date": "PatientBirthDate",
    "patient_sex": "PatientSex",
    "study_id": "StudyID",
    "accession_number": "AccessionNumber",
    "study_date": "StudyDate",
    "study_time": "StudyTime",
    "referring_physician_name": "ReferringPhysicianName",
}


def encode_rtstruct(
    series: DicomSeries, classes: NDArray[np.uint8], task: Task, receipt: Receipt, tolerance: float = 0.0
) -> bytes:
    """Encode class indices on the series' own grid [columns, rows, slices]; `tolerance` is in mm.

    Raises UnsupportedScan where the source lacks what every instance must repeat, ScanTooLarge for more
    contours than are read back.
    """
    with supported(series):
        check_identifiers(series)
    drawn = _drawn(series, classes, task, tolerance)
    with supported(series):
        return written(_made(series, classes, task, receipt, drawn))


def _drawn(
    series: DicomSeries, classes: NDArray[np.uint8], task: Task, tolerance: float
) -> dict[str, list[tuple[int, NDArray[np.float64]]]]:
    """The contours of each label: the slice of each, and its points (column, row)."""
    spacing = series.frames[0].spacing
    assert spacing is not None
    found: dict[str, list[tuple[int, NDArray[np.float64]]]] = {label: [] for label in segments_of(task)}
    traced = points = contours = 0
    for place, plane in enumerate(np.ascontiguousarray(classes.transpose(2, 1, 0))):
        there = np.bincount(plane.ravel(), minlength=len(task.classes)) > 0
        for label, own in found.items():
            members = np.zeros(len(there), bool)
            members[[*task.label_classes(label)]] = True
            if not (there & members).any():
                continue
            mask = members[plane]
            traced += count_points(mask)
            drawn = outlines(mask, tolerance, (spacing[1], spacing[0])) if traced <= _MOST_TRACED else []
            own += [(place, outline) for outline in drawn]
            points, contours = points + sum(map(len, drawn)), contours + len(drawn)
            if max(traced / _MOST_TRACED, points / MOST_POINTS, contours / MOST_CONTOURS) > 1:
                raise ScanTooLarge(
                    f"the contours of this mask are more than {MOST_CONTOURS} or have more than "
                    f"{MOST_POINTS} points; give a larger tolerance_mm, or ask for output=nifti"
                )
    return found


def _made(
    series: DicomSeries,
    classes: NDArray[np.uint8],
    task: Task,
    receipt: Receipt,
    drawn: dict[str, list[tuple[int, NDArray[np.float64]]]],
) -> Any:
    # Two seconds of imports that only DICOM answers need.
    import highdicom as hd

    source, network = sources_of(series)[0], receipt.network
    key, software = instance_key(series, classes, receipt, "rtstruct"), f"Locum {receipt.locum}"
    made = hd.base.SOPClass(
        study_instance_uid=source.StudyInstanceUID,
        series_instance_uid=uid(key, "structures series"),
        series_number=SERIES_NUMBER + 2,
        sop_instance_uid=uid(key, "structures"),
        sop_class_uid=RTStructureSetStorage,
        instance_number=1,
        modality="RTSTRUCT",
        manufacturer=MANUFACTURER,
        # Contours are longer than the 64 KiB that a value may have in Explicit VR.
        transfer_syntax_uid=ImplicitVRLittleEndian,
        manufacturer_model_name=network.name[:64],
        software_versions=software,
        device_serial_number=network.digest.removeprefix("sha256:"),
        series_description=f"{network.name[:24]} structures, {NOTICE}",
        # A mask that comes back is read by the names of its ROIs.
        specific_character_set=(
            source.get("SpecificCharacterSet") if all(map(str.isascii, drawn)) else "ISO_IR 192"
        ),
        **{name: source.get(keyword) for name, keyword in _STUDY.items()},
    )
    made.copy_patient_and_study_information(source)
    made.FrameOfReferenceUID = source.FrameOfReferenceUID
    made.PositionReferenceIndicator = source.get("PositionReferenceIndicator") or ""
    made.OperatorsName = ""
    made.ContributingEquipmentSequence = [equipment_of(hd, receipt, software)]
    without_clock(made, source)
    made.StructureSetDate, made.StructureSetTime = made.ContentDate, made.ContentTime
    del made.ContentDate, made.ContentTime
    made.StructureSetLabel, made.StructureSetName = "SEGMENTATION", network.name[:64]
    made.StructureSetDescription = f"Automatic segmentation, {NOTICE}"
    made.ApprovalStatus = "UNAPPROVED"
    made.ReferencedFrameOfReferenceSequence = Items([_frame_of_reference(series, source)])
    rois: list[Dataset] = []
    contours: list[Dataset] = []
    observations: list[Dataset] = []
    for number, (label, own) in enumerate(drawn.items(), start=1):
        roi, outlined, observed = Dataset(), Dataset(), Dataset()
        roi.ROINumber, roi.ROIName = number, label[:64]
        roi.ReferencedFrameOfReferenceUID = source.FrameOfReferenceUID
        roi.ROIGenerationAlgorithm = "AUTOMATIC"
        roi.ROIGenerationDescription = f"{network.name[:40]}, {NOTICE}"
        outlined.ROIDisplayColor = [*colour_of(number)]
        outlined.ReferencedROINumber = number
        if own:
            outlined.ContourSequence = Items(
                [_contour(series, place, points, n) for n, (place, points) in enumerate(own, start=1)]
            )
        observed.ObservationNumber = observed.ReferencedROINumber = number
        observed.RTROIInterpretedType = observed.ROIInterpreter = ""
        if label in task.codes:
            code = hd.sr.CodedConcept.from_code(code_of(task.codes[label].type))
            observed.RTROIIdentificationCodeSequence = Items([code])
        for items, item in ((rois, roi), (contours, outlined), (observations, observed)):
            items.append(item)
    made.StructureSetROISequence = Items(rois)
    made.ROIContourSequence = Items(contours)
    made.RTROIObservationsSequence = Items(observations)
    return made


def _frame_of_reference(series: DicomSeries, source: Dataset) -> Dataset:
    """The series that the contours are on, with all its instances."""
    frame, study, one = Dataset(), Dataset(), Dataset()
    one.SeriesInstanceUID = source.SeriesInstanceUID
    files = dict.fromkeys(each.file for each in series.frames)
    one.ContourImageSequence = Items([_reference(series.headers[file]) for file in files])
    study.ReferencedSOPClassUID, study.ReferencedSOPInstanceUID = _STUDY_CLASS, source.StudyInstanceUID
    study.RTReferencedSeriesSequence = Items([one])
    frame.FrameOfReferenceUID = source.FrameOfReferenceUID
    frame.RTReferencedStudySequence = Items([study])
    return frame


def _reference(header: Dataset, frame: int | None = None) -> Dataset:
    item = Dataset()
    item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = header.SOPClassUID, header.SOPInstanceUID
    if frame is not None:
        item.ReferencedFrameNumber = frame + 1
    return item


def _contour(series: DicomSeries, place: int, points: NDArray[np.float64], number: int) -> Dataset:
    """A contour in the plane of the slice itself, which may be a little off the regular stack."""
    frame = series.frames[place]
    assert series.affine is not None
    assert frame.position is not None
    steps = series.affine[:3, :2].T * _TO_LPS
    item = Dataset()
    several = len(series.frames) > len(series.headers)
    item.ContourNumber = number
    item.ContourImageSequence = Items(
        [_reference(series.headers[frame.file], frame.index if several else None)]
    )
    item.ContourGeometricType = "CLOSED_PLANAR"
    item.NumberOfContourPoints = len(points)
    # Far below the contour's distance from the pixels' edges.
    smallest = float(np.linalg.norm(steps, axis=1).min())
    decimals = int(np.clip(np.ceil(-np.log10(smallest * INSET)) + 2, 3, 8))
    values = np.round(frame.position + points @ steps, decimals).ravel().tolist()
    text = "\\".join(map(repr, values)).encode()
    # As bytes: pydicom makes an object of each number of a DS. In Implicit VR no type is written.
    item.add(DataElement(_CONTOUR_DATA, "OB", text + b" " * (len(text) % 2)))
    return item
