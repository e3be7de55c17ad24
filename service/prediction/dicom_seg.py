"""Encode a segmentation as DICOM: a SEG on the slices of its source series, a report of the volumes.

An instance is a function of the source, the network, the options, the software and the device: the same
request makes the same instance, byte for byte, so that a PACS that receives it twice keeps one. After an
update, which may change the mask, it makes another, so that the PACS does not keep the outdated one. A report
depends on `review`, too, in whole percent: where other answers change the rank, it is another instance.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue
from pydicom import Dataset
from pydicom.uid import UID

from model_store.digest import sha256
from model_store.errors import UnsupportedScan
from model_store.scan import DicomSeries
from model_store.task import Task
from service.about import NOTICE
from service.errors import CodesMissing, LabelsOverlap
from service.prediction.dicom_source import sources_of, valid_value
from service.prediction.receipt import Receipt

SegmentationType = Literal["binary", "labelmap", "fractional"]

# highdicom quotes values of headers, the patient's name among them, in what it logs and warns of.
logging.getLogger("highdicom").setLevel(logging.CRITICAL + 1)
warnings.filterwarnings("ignore", module=r"highdicom(\.|$)")

MEDIA_TYPE: Final = "application/dicom"
_MANUFACTURER = "Locum"
_SERIES_NUMBER = 24001
# The coding scheme of what no standard names.
_SCHEME = "99LOCUM"
_DATES = (
    ("ContentDate", "ContentTime"),
    ("AcquisitionDate", "AcquisitionTime"),
    ("SeriesDate", "SeriesTime"),
    ("StudyDate", "StudyTime"),
)


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
    with _supported(series):
        _check_identifiers(series)
        return _written(_make_seg(series, classes, task, receipt, kind, _key(series, classes, receipt, kind)))


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
    with _supported(series):
        _check_identifiers(series)
        key = _key(series, classes, receipt, kind)
        seg = _make_seg(series, classes, task, receipt, kind, key)
        ranks = {label: round(100 * rank) for label, rank in review.items() if rank is not None}
        return _written(_make_report(series, seg, task, receipt, volumes, ranks, key)), _written(seg)


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
        manufacturer_name=_MANUFACTURER,
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
            finding_category=_code(task.codes[label].category),
            finding_type=_code(task.codes[label].type),
            algorithm_id=hd.sr.AlgorithmIdentification(
                name=network.name, version=network.digest.removeprefix("sha256:"), parameters=[NOTICE]
            ),
            measurements=measured(label),
        )
        for number, label in enumerate(_segments(task), start=1)
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
        series_number=_SERIES_NUMBER + 1,
        # Without a rank it is the instance that it was before ranks were reported.
        sop_instance_uid=uid(key, "report", *([json.dumps(ranks, sort_keys=True)] if ranks else [])),
        instance_number=1,
        manufacturer=_MANUFACTURER,
        manufacturer_model_name=network.name[:64],
        software_versions=f"Locum {receipt.locum}",
        device_serial_number=network.digest.removeprefix("sha256:"),
        series_description=f"{network.name[:24]} volumes, {NOTICE}",
        contributing_equipment=[_equipment(hd, receipt, f"Locum {receipt.locum}")],
        coding_schemes=schemes if ranks else None,
    )
    _without_clock(report, sources[0])
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
        source=_MANUFACTURER,
        parameters={
            "model": receipt.model.name,
            "personalization": receipt.personalization,
            **_other_options(receipt),
        },
    )
    descriptions = [
        hd.seg.SegmentDescription(
            segment_number=number,
            segment_label=label[:64],
            segmented_property_category=_code(task.codes[label].category),
            segmented_property_type=_code(task.codes[label].type),
            algorithm_type=hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm_identification=algorithm,
            tracking_uid=_tracking(key, label)[0],
            tracking_id=_tracking(key, label)[1],
        )
        for number, label in enumerate(_segments(task), start=1)
    ]
    seg = hd.seg.Segmentation(
        source_images=sources,
        pixel_array=_pixels(frames, task),
        segmentation_type=kind.upper(),
        segment_descriptions=descriptions,
        series_instance_uid=uid(key, "series"),
        series_number=_SERIES_NUMBER,
        sop_instance_uid=uid(key, "instance"),
        instance_number=1,
        manufacturer=_MANUFACTURER,
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
        contributing_equipment=[_equipment(hd, receipt, software)],
    )
    _correct(seg, series, sources[0], key)
    return seg


def _check_identifiers(series: DicomSeries) -> None:
    """Raise UnsupportedScan unless a SEG can refer to every file."""
    headers, advice = series.headers, "export the series again, or ask for output=nifti or json"
    space = () if series.affine is None else ("FrameOfReferenceUID",)
    for keyword in ("SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", *space):
        wrong = sum(not UID(str(header.get(keyword) or "")).is_valid for header in headers)
        if wrong:
            raise UnsupportedScan(
                f"DICOM: expected a valid {keyword} in every file, to which a DICOM answer refers, found "
                f"{wrong} of {len(headers)} without; {advice}"
            )
    different = len({str(header.SOPInstanceUID) for header in headers})
    if different < len(headers):
        raise UnsupportedScan(
            f"DICOM: expected a SOPInstanceUID for each of {len(headers)} files, to which a DICOM answer "
            f"refers, found {different} different ones; {advice}"
        )


@contextmanager
def _supported(series: DicomSeries) -> Iterator[None]:
    """Turn what highdicom and pydicom raise for odd headers into a reason, without their text."""
    try:
        yield
    except (UnsupportedScan, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (series.headers[0].get("SOPClassUID"),):
            raise UnsupportedScan(
                "DICOM: expected a SOPClassUID of the standard, by which a DICOM answer repeats attributes, "
                "found another; ask for output=nifti or json"
            ) from None
        raise UnsupportedScan(
            f"DICOM: no DICOM answer can be made for this series ({type(error).__name__} in its header); ask "
            "for output=nifti or json"
        ) from None


def _written(dataset: Any) -> bytes:
    content = io.BytesIO()
    dataset.save_as(content)
    return content.getvalue()


def uid(*key: str) -> str:
    """Make a UID that is a function of the key (PS3.5 B.2: a UUID as a number)."""
    digest = bytearray(hashlib.sha256("\0".join(key).encode()).digest()[:16])
    digest[6], digest[8] = digest[6] & 0x0F | 0x80, digest[8] & 0x3F | 0x80  # UUID version 8
    return f"2.25.{int.from_bytes(digest, 'big')}"


def _key(series: DicomSeries, classes: NDArray[np.uint8], receipt: Receipt, kind: str) -> str:
    """List what the answer depends on. How the client named the model and hospital is not part of it.

    The scan is named by its instances and their mask, so that the same series in another order or container
    makes the same answer, and one with other pixels under the same UIDs another.
    """
    options = {k: v for k, v in receipt.options.items() if k not in (*_NAMING, "output")}
    instances: list[JsonValue] = [*sorted(str(header.SOPInstanceUID) for header in series.headers)]
    parts: list[JsonValue] = [
        instances,
        sha256(np.ascontiguousarray(classes).tobytes()),
        receipt.model.digest,
        receipt.network.digest,
        receipt.graph,
        receipt.personalization,
        options,
        kind,
        receipt.provider,
        receipt.onnxruntime,
        receipt.locum,
        receipt.machine,
        *([] if receipt.gpu is None else [receipt.gpu]),
    ]
    return json.dumps(parts, sort_keys=True)


_NAMING = ("model", "hospital", "site", "guard", "scanner", "segmentation_type")


def _other_options(receipt: Receipt) -> dict[str, str]:
    named = {k: v for k, v in receipt.options.items() if k not in (*_NAMING, "personalization", "output")}
    return {name: str(value) for name, value in named.items() if value is not None}


def _tracking(key: str, label: str) -> tuple[str, str]:
    return uid(key, "segment", label), f"{label[:32]}, {NOTICE}"


def _overlap(task: Task) -> bool:
    return any(len(task_class.labels) > 1 for task_class in task.classes)


def _segments(task: Task) -> list[str]:
    """The labels by segment number: a class index is its segment's number where labels do not overlap."""
    if _overlap(task):
        return list(task.labels)
    return [task_class.labels[0] for task_class in task.classes[1:]]


def _pixels(frames: NDArray[np.uint8], task: Task) -> NDArray[Any]:
    if not _overlap(task):
        return np.ascontiguousarray(frames)
    segments = [np.isin(frames, task.label_classes(label)) for label in _segments(task)]
    return np.stack(segments, axis=-1).astype(np.uint8)


def _in_source_order(series: DicomSeries, frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The mask frame by frame in the order of the source instances."""
    if len(series.headers) > 1:
        return frames
    return frames[np.argsort([frame.index for frame in series.frames])]


def _code(code: Any) -> Any:
    from pydicom.sr.coding import Code

    return Code(code.value, code.scheme, code.meaning)


def _equipment(hd: Any, receipt: Receipt, software: str) -> Any:
    from pydicom.sr.coding import Code

    equipment = hd.ContributingEquipment(
        manufacturer=_MANUFACTURER,
        purpose_of_reference=Code("109102", "DCM", "Processing Equipment"),
        manufacturer_model_name=receipt.network.name[:64],
        software_versions=software,
        contribution_description=f"Segmentation by {receipt.network.name}, {NOTICE}"[:1024],
    )
    # Each version, hence each version adapted to a hospital, is a device of its own.
    equipment.DeviceUID = device_uid(receipt.network.digest)
    return equipment


def device_uid(digest: str) -> str:
    """The UID of a published version as a device, by its digest."""
    return uid("device", digest)


def _correct(seg: Any, series: DicomSeries, source: Dataset, key: str) -> None:
    """Replace what highdicom takes from the clock, from chance, or from a header's wrong spacing."""
    if series.affine is not None and "SharedFunctionalGroupsSequence" in seg:
        measures = seg.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        measures.SpacingBetweenSlices = round(float(np.linalg.norm(series.affine[:3, 2])), 6)
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
    _without_clock(seg, source)


def _without_clock(made: Any, source: Dataset) -> None:
    for item in made.ContributingEquipmentSequence:
        if "ContributionDateTime" in item:
            del item.ContributionDateTime
    made.ContentDate, made.ContentTime = _content_moment(source)
    for keyword in ("InstanceCreationDate", "InstanceCreationTime", "SeriesDate", "SeriesTime"):
        if keyword in made:
            delattr(made, keyword)


def _content_moment(source: Dataset) -> Sequence[str]:
    """When the source was made: a clock would make every repetition another instance."""
    for date, time in _DATES:
        if found := valid_value(source, date):
            return str(found), str(valid_value(source, time) or "000000")
    return "19000101", "000000"
