"""Read the figures that a PACS has of a patient: volumes of SEGs and TID 1500 reports, and who made them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pydicom import dcmread

from model_store.errors import ScanError
from model_store.scan import decode_mask
from model_store.task import Task
from service.about import NOTICE
from service.catalog.network import Selection
from service.errors import NoVolumeToReport, PacsJobFailed, SeriesMismatched, SeriesMissing
from service.pacs.client import PacsClient
from service.prediction.dicom_instance import device_uid
from service.settings import scan_limits
from service.worker.attempt import Attempt
from service.worker.pacs import unpacked
from service.worker.pacs_correction import devices_of, source_of

# Series of SEGs and SRs of one patient that are fetched.
_MOST = 300
_ML: Final[Mapping[str, float]] = {"ml": 1.0, "mL": 1.0, "cm3": 1.0, "mm3": 1e-3, "l": 1e3, "L": 1e3}


@dataclass(frozen=True)
class ListedSeries:
    """A series that the PACS lists of the patient; `moment` is the date and time of its study."""

    study: str
    series: str
    modality: str
    moment: str


@dataclass(frozen=True)
class Figure:
    """Volumes in mL by label that a SEG or SR in the PACS has of a series.

    `made_by` is the version that made it, "" where the store knows none of its devices.
    """

    kind: str
    series: str
    made_by: str
    same_version: bool
    volumes: Mapping[str, float]


def figures_of(
    attempt: Attempt, pacs: PacsClient, listed: Mapping[str, ListedSeries], selection: Selection
) -> tuple[dict[str, list[Figure]], int]:
    """The figures by the UID of the series that they are of, and how many SEGs and SRs cannot be read.

    Raises PacsJobFailed.
    """
    there = sorted(
        (each for each in listed.values() if each.modality in ("SEG", "SR")),
        key=lambda each: (each.modality, each.series),
    )
    if len(there) > _MOST:
        raise PacsJobFailed(f"the patient has more than {_MOST} series of SEGs and SRs in the PACS")
    known: dict[str, str] | None = None
    found: dict[str, list[Figure]] = {}
    unread = 0
    for number, each in enumerate(there, start=1):
        attempt.set_stage("fetching", series=number, of=len(there))
        try:
            parts = unpacked(pacs.fetch_series(each.study, each.series, scan_limits(attempt.settings)))
        except (ScanError, SeriesMissing, SeriesMismatched):
            unread += 1
            continue
        for content in parts:
            try:
                read = _in_report(content) if each.modality == "SR" else _in_seg(attempt, content)
            # What other systems write breaks readers in many ways; none may cost the comparison.
            except Exception:
                unread += 1
                continue
            known = _versions(attempt) if known is None and read.devices else known
            names = sorted({(known or {})[uid] for uid in read.devices if uid in (known or {})})
            same = device_uid(selection.model.digest) in read.devices
            for source in read.sources:
                volumes = _by_label(selection.manifest.task, read.named)
                figure = Figure(each.modality, each.series, ", ".join(names), same, volumes)
                found.setdefault(source, []).append(figure)
    return found, unread


def _versions(attempt: Attempt) -> dict[str, str]:
    """The names of the versions that this hospital sees, by their UIDs as devices."""
    hospital = attempt.options.hospital
    store = attempt.settings.open_store().visible_to(lambda owner: owner == hospital)
    return {
        device_uid(version.artefact.digest): str(version.artefact)
        for name in store.versions.names()
        for version in store.versions.of(name)
    }


@dataclass(frozen=True)
class _Named:
    """A volume, and how it is named: by text and by code."""

    name: str
    code: tuple[str, str]
    volume_ml: float


@dataclass(frozen=True)
class _Found:
    sources: frozenset[str]
    devices: set[str]
    named: Sequence[_Named]


def _in_seg(attempt: Attempt, content: bytes) -> _Found:
    header = dcmread(io.BytesIO(content), stop_before_pixels=True)
    mask = decode_mask(content, scan_limits(attempt.settings))
    voxel_ml = mask.voxel_volume_ml
    if voxel_ml is None:
        raise NoVolumeToReport("a SEG of a single image has no volume")
    counts = np.bincount(mask.voxels.ravel(order="K"), minlength=max(mask.segments, default=0) + 1)
    named = [
        _Named(each.name, (each.code, each.scheme), float(counts[number]) * voxel_ml)
        for number, each in mask.segments.items()
    ]
    return _Found(frozenset({source_of(header)} - {""}), devices_of(header), named)


def _in_report(content: bytes) -> _Found:
    """The volumes that a TID 1500 report has of segments."""
    import highdicom as hd
    from pydicom.sr.codedict import codes

    report: Any = hd.sr.srread(io.BytesIO(content))
    named, sources = [], set()
    for group in report.content.get_volumetric_roi_measurement_groups():
        segment = group.referenced_segment
        if segment is None or segment.source_series_for_segmentation is None:
            continue
        code = group.finding_type
        for measured in group.get_measurements(name=codes.SCT.Volume):
            unit = measured.unit
            if unit is None or unit.value not in _ML:
                continue
            name = str(group.tracking_identifier or "").removesuffix(f", {NOTICE}")
            key = ("", "") if code is None else (code.value, code.scheme_designator)
            named.append(_Named(name, key, float(measured.value) * _ML[unit.value]))
            sources.add(str(segment.source_series_for_segmentation.value))
    return _Found(frozenset(sources), devices_of(report), named)


def _by_label(task: Task, named: Sequence[_Named]) -> dict[str, float]:
    """The volumes of the task's labels, by the code of a label, else by its name."""
    codes = {label: (own.type.value, own.type.scheme) for label, own in task.codes.items()}
    found: dict[str, float] = {}
    for label in task.labels:
        own = [each for each in named if each.code[0] and each.code == codes.get(label)]
        # Several labels may have one code.
        own = [each for each in own if each.name.casefold() == label.casefold()] or own
        own = own or [each for each in named if each.name.casefold() == label.casefold()]
        if len(own) == 1:
            found[label] = own[0].volume_ml
    return found
