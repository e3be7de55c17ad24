"""Encode a segmentation as DICOM: a SEG on the slices of its source series, a report of the volumes.

A report depends on `review`, too, in whole percent: where other answers change the rank, it is another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset

from model_store.scan import DicomSeries
from model_store.task import Task
from service.about import NOTICE
from service.errors import CodesMissing, LabelsOverlap
from service.prediction.dicom_instance import (
    MANUFACTURER,
    SERIES_NUMBER,
    check_identifiers,
    code_of,
    device_uid,
    equipment_of,
    instance_key,
    other_options,
    supported,
    uid,
    without_clock,
    written,
)
from service.prediction.dicom_source import sources_of
from service.prediction.receipt import Receipt

SegmentationType = Literal["binary", "labelmap", "fractional"]

MEDIA_TYPE: Final = "application/dicom"
# The coding scheme of what no standard names.
_SCHEME = "99LOCUM"


def check_codes(task: Task, kind: SegmentationType) -> None:
    """Check that every segment can be named. Raises CodesMissing, LabelsOverlap."""
    missing = [label for label in task.labels if label not in task.codes]
    if missing:
        raise CodesMissing(
            f"A DICOM segmentation names each label by a code, and task '{task.name}' has none for "
            f"{', '.join(missing)}. Add `codes` to task.yaml (SNOMED CT: category and type of each label) "
            "and publish the model again, or ask for output=nifti."
        )
    if kind == "labelmap" and _overlap(task):
        raise LabelsOverlap(
            f"Labels of task '{task.name}' overlap, and a voxel of a label map has one segment; leave out "
            "segmentation_type or ask for binary."
        )


def encode_seg(
    series: DicomSeries,
    classes: NDArray[np.uint8],
    task: Task,
    receipt: Receipt,
    kind: SegmentationType = "binary",
) -> bytes:
    """Encode class indices on the series' own grid ([columns, rows, slices], or [rows, columns]).

    Raises UnsupportedScan where the source lacks what every SEG must repeat.
    """
    with supported(series):
        check_identifiers(series)
        return written(
            _make_seg(series, classes, task, receipt, kind, instance_key(series, classes, receipt, kind))
        )


def encode_report(
    series: DicomSeries,
    classes: NDArray[np.uint8],
    task: Task,
    receipt: Receipt,
    volumes: Mapping[str, float],
    review: Mapping[str, float | None],
    kind: SegmentationType = "binary",
) -> tuple[bytes, bytes]:
    """Encode a measurement report (TID 1500) with the volume of each label in mL, and its rank `review` among
    the hospital's own answers, 0 to 1, where it has one.

    Returns:
        (the report, the SEG that it refers to): the SEG is that of `encode_seg` for the same arguments.

    Raises as `encode_seg`.
    """
    with supported(series):
        check_identifiers(series)
        key = instance_key(series, classes, receipt, kind)
        seg = _make_seg(series, classes, task, receipt, kind, key)
        ranks = {label: round(100 * rank) for label, rank in review.items() if rank is not None}
        return written(_make_report(series, seg, task, receipt, volumes, ranks, key)), written(seg)


def _make_report(
    series: DicomSeries,
    seg: Any,
    task: Task,
    receipt: Receipt,
    volumes: Mapping[str, float],
    ranks: Mapping[str, int],
    key: str,
) -> Any:
    import highdicom as hd
    from pydicom.sr.codedict import codes
    from pydicom.sr.coding import Code

    millilitre, percent = Code("ml", "UCUM", "milliliter"), Code("%", "UCUM", "percent")
    less_sure = Code("review", _SCHEME, "Share of the hospital's newest answers that were less sure")

    def measured(label: str) -> list[Any]:
        volume = hd.sr.Measurement(name=codes.SCT.Volume, value=volumes[label], unit=millilitre)
        if label not in ranks:
            return [volume]
        return [volume, hd.sr.Measurement(name=less_sure, value=ranks[label], unit=percent)]

    network = receipt.network
    device = hd.sr.DeviceObserverIdentifyingAttributes(
        uid=device_uid(network.digest),
        name=f"{network.name}, {NOTICE}",
        manufacturer_name=MANUFACTURER,
        model_name=network.name,
        serial_number=network.digest.removeprefix("sha256:"),
    )
    groups = [
        hd.sr.VolumetricROIMeasurementsAndQualitativeEvaluations(
            tracking_identifier=hd.sr.TrackingIdentifier(*_tracking(key, label)),
            referenced_segment=hd.sr.ReferencedSegment(
                sop_class_uid=seg.SOPClassUID,
                sop_instance_uid=seg.SOPInstanceUID,
                segment_number=number,
                source_series=hd.sr.SourceSeriesForSegmentation(series.headers[0].SeriesInstanceUID),
            ),
            finding_category=code_of(task.codes[label].category),
            finding_type=code_of(task.codes[label].type),
            algorithm_id=hd.sr.AlgorithmIdentification(
                name=network.name, version=network.digest.removeprefix("sha256:"), parameters=[NOTICE]
            ),
            measurements=measured(label),
        )
        for number, label in enumerate(segments_of(task), start=1)
    ]
    schemes = [
        hd.coding_schemes.CodingSchemeIdentificationItem(
            _SCHEME,
            name="Codes of Locum",
            uid=uid("coding scheme", _SCHEME),
            responsible_organization="Locum",
        )
    ]
    sources = sources_of(series)
    report = hd.sr.ComprehensiveSR(
        evidence=[seg, *sources],
        content=hd.sr.MeasurementReport(
            observation_context=hd.sr.ObservationContext(
                observer_device_context=hd.sr.ObserverContext(codes.DCM.Device, device)
            ),
            procedure_reported=codes.SCT.ImagingProcedure,
            imaging_measurements=groups,
            title=codes.DCM.ImagingMeasurementReport,
        ),
        series_instance_uid=uid(key, "report series"),
        series_number=SERIES_NUMBER + 1,
        # Without a rank it is the instance that it was before ranks were reported.
        sop_instance_uid=uid(key, "report", *([json.dumps(ranks, sort_keys=True)] if ranks else [])),
        instance_number=1,
        manufacturer=MANUFACTURER,
        manufacturer_model_name=network.name[:64],
        software_versions=f"Locum {receipt.locum}",
        device_serial_number=network.digest.removeprefix("sha256:"),
        series_description=f"{network.name[:24]} volumes, {NOTICE}",
        contributing_equipment=[equipment_of(hd, receipt, f"Locum {receipt.locum}")],
        coding_schemes=schemes if ranks else None,
    )
    without_clock(report, sources[0])
    return report


def _make_seg(
    series: DicomSeries,
    classes: NDArray[np.uint8],
    task: Task,
    receipt: Receipt,
    kind: SegmentationType,
    key: str,
) -> Any:
    # Two seconds of imports that only this output needs.
    import highdicom as hd
    from pydicom.sr.codedict import codes

    frames = classes[None] if series.affine is None else classes.transpose(2, 1, 0)
    sources, frames = sources_of(series), _in_source_order(series, frames)
    software = f"Locum {receipt.locum}"
    algorithm = hd.AlgorithmIdentificationSequence(
        name=receipt.network.name[:64],
        family=codes.cid7162.ArtificialIntelligence,
        version=receipt.network.digest.removeprefix("sha256:"),
        source=MANUFACTURER,
        parameters={
            "model": receipt.model.name,
            "personalization": receipt.personalization,
            **other_options(receipt),
        },
    )
    descriptions = [
        hd.seg.SegmentDescription(
            segment_number=number,
            segment_label=label[:64],
            segmented_property_category=code_of(task.codes[label].category),
            segmented_property_type=code_of(task.codes[label].type),
            algorithm_type=hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=algorithm,
            tracking_uid=_tracking(key, label)[0],
            tracking_id=_tracking(key, label)[1],
        )
        for number, label in enumerate(segments_of(task), start=1)
    ]
    seg = hd.seg.Segmentation(
        source_images=sources,
        pixel_array=_pixels(frames, task),
        segmentation_type=kind.upper(),
        segment_descriptions=descriptions,
        series_instance_uid=uid(key, "series"),
        series_number=SERIES_NUMBER,
        sop_instance_uid=uid(key, "instance"),
        instance_number=1,
        manufacturer=MANUFACTURER,
        manufacturer_model_name=receipt.network.name[:64],
        software_versions=software,
        device_serial_number=receipt.network.digest.removeprefix("sha256:"),
        # The mask says in or out of each voxel: occupied by all or by nothing.
        fractional_type="OCCUPANCY",
        max_fractional_value=1,
        content_description=f"Automatic segmentation, {NOTICE}",
        content_label="SEGMENTATION",
        series_description=f"{receipt.network.name[:24]} segmentation, {NOTICE}",
        omit_empty_frames=False,
        contributing_equipment=[equipment_of(hd, receipt, software)],
    )
    _correct(seg, series, sources[0], key)
    return seg


def _tracking(key: str, label: str) -> tuple[str, str]:
    return uid(key, "segment", label), f"{label[:32]}, {NOTICE}"


def _overlap(task: Task) -> bool:
    return any(len(task_class.labels) > 1 for task_class in task.classes)


def segments_of(task: Task) -> list[str]:
    """The labels by segment number: a class index is its segment's number where labels do not overlap."""
    if _overlap(task):
        return list(task.labels)
    return [task_class.labels[0] for task_class in task.classes[1:]]


def _pixels(frames: NDArray[np.uint8], task: Task) -> NDArray[Any]:
    if not _overlap(task):
        return np.ascontiguousarray(frames)
    segments = [np.isin(frames, task.label_classes(label)) for label in segments_of(task)]
    return np.stack(segments, axis=-1).astype(np.uint8)


def _in_source_order(series: DicomSeries, frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The mask frame by frame in the order of the source instances."""
    if len(series.headers) > 1:
        return frames
    return frames[np.argsort([frame.index for frame in series.frames])]


def _correct(seg: Any, series: DicomSeries, source: Dataset, key: str) -> None:
    """Replace what highdicom takes from the clock, from chance, or from a header's wrong spacing."""
    if series.gap is not None and "SharedFunctionalGroupsSequence" in seg:
        measures = seg.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        measures.SpacingBetweenSlices = round(series.gap, 6)
    if series.affine is None:
        # Required, if only empty, of an image that has no orientation in the patient (PS3.3 C.7.6.1).
        seg.PatientOrientation = source.get("PatientOrientation") or ""
        shared = seg.get("SharedFunctionalGroupsSequence", [Dataset()])[0]
        # Readers expect a thickness beside a spacing, and a projection has none.
        measured = series.frames[0].spacing is not None and source.get("SliceThickness")
        if "PixelMeasuresSequence" in shared and not measured:
            del shared.PixelMeasuresSequence
    organization = uid(key, "dimensions")
    for item in seg.get("DimensionOrganizationSequence", ()):
        item.DimensionOrganizationUID = organization
    for item in seg.get("DimensionIndexSequence", ()):
        item.DimensionOrganizationUID = organization
    without_clock(seg, source)
