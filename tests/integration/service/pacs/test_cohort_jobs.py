"""Jobs that fill a cohort from a real Orthanc."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import Any

import pydicom
import pytest

from model_store.scan import decode
from service.cohorts import cohorts
from service.context import ServiceContext
from service.database import CohortScan, Job
from service.errors import CohortInUse
from service.pacs.requests import CohortFill, PacsSubmission
from service.settings import scan_limits
from service.worker.runner import run_job
from tests.helpers.model_store.dicom_files import uid
from tests.helpers.service.coded import VOLUME, coded_series
from tests.helpers.service.orthanc import Gate, Orthanc, gate_before
from tests.helpers.service.pacs_jobs import Unqueued
from tests.helpers.service.queued import queued
from tests.helpers.service.workplace import Workplace

PATIENTS = {"ONE": 2, "TWO": 1}
"""Series of each."""


@pytest.fixture(scope="module")
def gate(orthanc: Orthanc) -> Iterator[Gate]:
    for patient, count in PATIENTS.items():
        for number in range(count):
            orthanc.add(planted(f"{patient}-PLANTED", number))
    orthanc.add(planted("ONE-PLANTED", 9, Rows=None))
    with gate_before(orthanc) as found:
        yield found


def planted(patient: str, number: int, **removed: Any) -> dict[str, bytes]:
    """A series of its own study."""

    def change(dataset: Any, place: int) -> None:
        dataset.PatientID = patient
        dataset.StudyInstanceUID = uid(patient, number)
        dataset.SeriesInstanceUID = uid(patient, number, "series")
        dataset.SOPInstanceUID = uid(patient, number, place)
        dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
        for keyword in removed:
            delattr(dataset, keyword)

    return coded_series(change=change)


@pytest.fixture(autouse=True)
def reset(gate: Gate) -> None:
    gate.rule = lambda method, path: None
    gate.seen.clear()


def ask(place: Workplace, cohort: str, **fields: Any) -> str:
    asked = CohortFill.model_validate({"pacs": "main", "query": {"Modality": "CT"}, **fields})
    context: ServiceContext = Unqueued(place)  # type: ignore[assignment]
    return PacsSubmission(context, "main", None, "0" * 32).fill("dune", cohort, asked)[0]


def fill(place: Workplace, cohort: str, **fields: Any) -> Job:
    job_id = ask(place, cohort, **fields)
    run_job(job_id, place.settings)
    return place.job(job_id)


def scans(place: Workplace, cohort: str) -> list[CohortScan]:
    with place.database.read() as session:
        return cohorts.scans(session, cohort)


def test_found_series_are_added_once_without_the_patient(place: Workplace, gate: Gate) -> None:
    cohort = place.cohort({})
    job = fill(place, cohort)
    assert (job.state, job.result) == (
        "succeeded",
        {"found": 4, "added": 3, "already": 0, "skipped": {"UnsupportedScan": 1}},
    )
    rows = scans(place, cohort)
    assert len(rows) == 3
    # Two of one patient, one of another.
    assert sorted(len(row.name.split("/")) for row in rows) == [2, 2, 2]
    assert len({row.name.split("/")[0] for row in rows}) == 2
    for row in rows:
        kept = cohorts.file_of(place.settings, row, row.name).read()
        voxels = decode(kept, scan_limits(place.settings)).voxels[..., 0].transpose(2, 1, 0)
        assert (voxels == VOLUME).all()
        with zipfile.ZipFile(io.BytesIO(kept)) as archive:
            for name in archive.namelist():
                dataset = pydicom.dcmread(io.BytesIO(archive.read(name)))
                assert (dataset.PatientID, dataset.PatientIdentityRemoved) == ("", "YES")
                assert "PLANTED" not in str(dataset).upper()
    gate.seen.clear()
    again = fill(place, cohort)
    assert again.result == {"found": 4, "added": 0, "already": 3, "skipped": {"UnsupportedScan": 1}}
    assert len(scans(place, cohort)) == 3
    # What is there is not fetched again.
    assert sum("/series/" in path and "instances" not in path for _, path in gate.seen) == 1
    shown = repr([(e.data, job.options, job.progress) for e in place.events(job.id)])
    assert "PLANTED" not in shown
    assert uid("ONE-PLANTED", 0) not in shown


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"most": 3}, "more than 3 series"),
        ({"query": {"PatientID": "THREE*"}}, "finds no series"),
        ({"query": {"SeriesInstanceUID": uid("ONE-PLANTED", 9, "series")}}, "none of the 1 series"),
    ],
)
def test_query_that_finds_too_much_or_nothing_fails(
    place: Workplace, fields: dict[str, Any], said: str
) -> None:
    cohort = place.cohort({})
    job = fill(place, cohort, **fields)
    assert job.state == "failed"
    assert job.reason is not None
    assert said in job.reason
    assert "PLANTED" not in job.reason
    assert scans(place, cohort) == []


def test_query_chooses_by_patient(place: Workplace) -> None:
    cohort = place.cohort({})
    assert fill(place, cohort, query={"PatientID": "TWO*"}).result == {
        "found": 1,
        "added": 1,
        "already": 0,
        "skipped": {},
    }


def test_series_that_arrives_as_another_patients_is_skipped(place: Workplace, gate: Gate) -> None:
    cohort, other = place.cohort({}), planted("ANOTHER", 1)
    parts = b"".join(
        b"--x\r\nContent-Type: application/dicom\r\n\r\n" + one + b"\r\n" for one in other.values()
    )
    kind = 'multipart/related; type="application/dicom"; boundary=x'
    gate.rule = lambda method, path: (
        (200, {"Content-Type": kind}, parts + b"--x--\r\n")
        if "/series/" in path and "instances" not in path
        else None
    )
    job = fill(place, cohort, query={"PatientID": "TWO*"})
    assert job.result == {"found": 1, "added": 0, "already": 0, "skipped": {"SeriesMismatched": 1}}
    assert scans(place, cohort) == []


def test_attempt_after_a_failure_adds_the_rest(place: Workplace, gate: Gate) -> None:
    cohort = place.cohort({})
    fetched = 0

    def failing(method: str, path: str) -> Any:
        nonlocal fetched
        fetched += "/series/" in path and "instances" not in path
        return (503, {}, b"") if fetched > 2 else None

    gate.rule = failing
    job_id = ask(place, cohort)
    run_job(job_id, place.settings)
    assert place.job(job_id).state == "queued"
    there = len(scans(place, cohort))
    assert 1 <= there <= 2
    gate.rule = lambda method, path: None
    with place.database.write() as session:
        found = session.get(Job, job_id)
        assert found is not None
        found.retry_at = None
    run_job(job_id, place.settings)
    job = place.job(job_id)
    assert job.state == "succeeded"
    assert job.result is not None
    assert (job.result["already"], job.result["added"]) == (there, 3 - there)
    assert len(scans(place, cohort)) == 3


def test_deleted_cohort_ends_the_job_and_one_in_use_makes_it_wait(place: Workplace, gate: Gate) -> None:
    cohort = place.cohort({})
    job_id = ask(place, cohort)
    # An upload that goes on does not keep the scans from being deleted.
    cohorts.remove(place.database, place.settings, "dune", cohort)
    run_job(job_id, place.settings)
    assert place.job(job_id).state == "failed"
    busy = place.cohort({})
    waiting = ask(place, busy)
    with place.database.write() as session:
        queued(
            session,
            place.settings,
            kind="adaptation",
            hospital="dune",
            model="plain",
            parent="",
            cohort=busy,
            options={},
        )
    with pytest.raises(CohortInUse), place.database.read() as session:
        cohorts.check_idle(session, busy)
    run_job(waiting, place.settings)
    assert place.job(waiting).state == "queued"
    assert "works on the scans" in place.job(waiting).progress["why"]
