"""A person edits our SEG or RTSTRUCT and stores it in the PACS: a job finds it and takes the mask home."""

from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from pydicom import Dataset
from pydicom.uid import generate_uid

from service import corrections
from service.context import ServiceContext
from service.database import Job
from service.pacs.requests import EditedSearch, PacsSubmission, SeriesSegmentation
from service.worker.runner import run_job
from tests.helpers.service.coded import SERIES, STUDY, coded_series
from tests.helpers.service.orthanc import Gate, Orthanc
from tests.helpers.service.pacs_jobs import Unqueued
from tests.helpers.service.workplace import Workplace


@pytest.fixture(autouse=True)
def reset(orthanc: Orthanc, gate: Gate) -> None:
    gate.rule, gate.hold_store, gate.let_pass = (lambda method, path: None), None, 0
    orthanc.clear()
    orthanc.add(coded_series())


def submission(place: Workplace) -> PacsSubmission:
    context: ServiceContext = Unqueued(place)  # type: ignore[assignment]
    return PacsSubmission(context, "main", None, "0" * 32)


def done(place: Workplace, job_id: str) -> Job:
    run_job(job_id, place.settings)
    job = place.job(job_id)
    assert job.state == "succeeded", job.reason
    return job


def looked(place: Workplace) -> dict[str, Any]:
    asked = EditedSearch.model_validate({"pacs": "main", "query": {"StudyInstanceUID": STUDY}})
    result: dict[str, Any] = done(place, submission(place).find_edited("dune", asked)[0]).result or {}
    return result


def edited(ours: Dataset, remove: int) -> Dataset:
    """As a viewer stores what a person changed: other UIDs, its own name, and who contributed before."""
    bits = np.unpackbits(np.frombuffer(ours.PixelData, np.uint8), bitorder="little")
    there = np.flatnonzero(bits)[:remove]
    bits[there] = 0
    ours.PixelData = np.packbits(bits, bitorder="little").tobytes()
    ours.SOPInstanceUID = ours.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    ours.SeriesInstanceUID = generate_uid()
    ours.Manufacturer = "A viewer"
    return ours


def file_of(dataset: Dataset) -> bytes:
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def test_edited_segmentation_is_a_correction_and_our_own_is_none(place: Workplace, orthanc: Orthanc) -> None:
    fields = {"hospital": "dune", "study": STUDY, "series": SERIES, "model": "coded", "store": True}
    done(place, submission(place).segment(SeriesSegmentation.model_validate(fields))[0])
    (ours,) = orthanc.instances("SEG")
    assert looked(place) == {"found": 1, "taken": 0, "skipped": {"unchanged": 1}}
    changed = edited(ours, 7)
    foreign = edited(orthanc.instances("SEG")[0], 3)
    del foreign.ContributingEquipmentSequence
    orthanc.add({name: file_of(each) for name, each in (("edited", changed), ("foreign", foreign))})
    assert looked(place) == {
        "found": 3,
        "taken": 1,
        "skipped": {"unchanged": 1, "not of an answer": 1},
    }
    with place.database.read() as session:
        found, *_ = corrections.page(session, "dune")
    (change,) = (found.labels or {}).values()
    assert (found.way, found.state, found.exact) == ("pacs", "measured", True)
    assert (change.added_voxels, change.removed_voxels) == (0, 7)
    # A second look takes nothing twice.
    assert looked(place)["skipped"]["taken before"] == 1


def test_edited_rtstruct_is_a_correction_too(place: Workplace, orthanc: Orthanc) -> None:
    fields = {"hospital": "dune", "study": STUDY, "series": SERIES, "model": "coded", "store": True}
    asked = SeriesSegmentation.model_validate({**fields, "output": "dicom-rtstruct"})
    done(place, submission(place).segment(asked)[0])
    (ours,) = orthanc.instances("RTSTRUCT")
    assert looked(place) == {"found": 1, "taken": 0, "skipped": {"unchanged": 1}}
    # A person deletes a contour, and draws an ROI that is no label.
    contours = ours.ROIContourSequence[0].ContourSequence
    largest = max(range(len(contours)), key=lambda number: contours[number].NumberOfContourPoints)
    other = deepcopy(ours.StructureSetROISequence[0])
    other.ROINumber, other.ROIName = 2, "GTV"
    ours.StructureSetROISequence.append(other)
    drawn = Dataset()
    drawn.ReferencedROINumber, drawn.ContourSequence = 2, [contours[largest]]
    ours.ROIContourSequence.append(drawn)
    del contours[largest]
    ours.SOPInstanceUID = ours.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    ours.SeriesInstanceUID, ours.Manufacturer = generate_uid(), "A planning system"
    orthanc.add({"edited": file_of(ours)})
    assert looked(place) == {"found": 2, "taken": 1, "skipped": {"unchanged": 1}}
    with place.database.read() as session:
        found, *_ = corrections.page(session, "dune")
    (change,) = (found.labels or {}).values()
    assert (found.way, found.state, found.exact) == ("pacs", "measured", True)
    assert change.added_voxels == 0
    assert change.removed_voxels > 1
