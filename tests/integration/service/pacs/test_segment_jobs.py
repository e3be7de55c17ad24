"""Jobs that segment a series of a real Orthanc: one SEG in it, whatever fails or is killed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import highdicom as hd
import numpy as np
import pytest
from sqlalchemy import delete

from model_store.artefact import Artefact
from model_store.lens import FINGERPRINT
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.scan import decode, decode_mask
from service.audit import trail
from service.context import ServiceContext
from service.database import Job, Watch, WatchEvent
from service.errors import JobCancelled
from service.jobs import records
from service.jobs.files import JobFolder
from service.jobs.leases import claim
from service.pacs.requests import PacsSubmission, SeriesSegmentation
from service.runtime.embedded_worker import worker_environment
from service.worker.attempt import Attempt
from service.worker.runner import run_job
from tests.helpers.model_store.dicom_files import series, uid, zipped
from tests.helpers.service.adapted_store import publish_space
from tests.helpers.service.alarmed import put_alarm
from tests.helpers.service.coded import CODED, CODES, SERIES, STUDY, VOLUME, coded_series
from tests.helpers.service.orthanc import Gate, Orthanc
from tests.helpers.service.pacs_jobs import Unqueued
from tests.helpers.service.workplace import Workplace
from tests.helpers.waiting import wait_for
from tests.integration.service.worker.test_lens import AT, SLICES, fingerprint, phantom


@pytest.fixture(autouse=True)
def reset(orthanc: Orthanc, gate: Gate) -> None:
    gate.rule, gate.hold_store, gate.let_pass = (lambda method, path: None), None, 0
    gate.held.clear()
    gate.seen.clear()
    orthanc.clear()
    orthanc.add(coded_series())


def ask(place: Workplace, **fields: Any) -> str:
    """The id of a job, submitted as the route does."""
    asked = SeriesSegmentation.model_validate(
        {"hospital": "dune", "study": STUDY, "series": SERIES, "model": "coded", "store": True, **fields}
    )
    context: ServiceContext = Unqueued(place)  # type: ignore[assignment]
    return PacsSubmission(context, "main", None, "0" * 32).segment(asked)[0]


def done(place: Workplace, job_id: str) -> Job:
    run_job(job_id, place.settings)
    return place.job(job_id)


def test_stored_seg_has_the_mask_and_the_job_keeps_only_its_uids(place: Workplace, orthanc: Orthanc) -> None:
    job_id = ask(place)
    job = done(place, job_id)
    assert (job.state, job.result) == ("succeeded", {"stored": True, "new": True}), job.reason
    (stored,) = orthanc.instances("SEG")
    seg = hd.seg.Segmentation.from_dataset(stored)
    assert (seg.StudyInstanceUID, seg.PatientName) == (STUDY, "Planted^Patient")
    sources = sorted(orthanc.instances("CT"), key=lambda each: float(each.ImagePositionPatient[2]))
    drawn = seg.get_pixels_by_source_instance([each.SOPInstanceUID for each in sources], [1])
    np.testing.assert_array_equal(drawn[..., 0] > 0, VOLUME > 100)
    answer = place.folder(job_id).read_result()
    assert answer is not None
    assert json.loads(answer.body)["SOPInstanceUID"] == stored.SOPInstanceUID
    assert place.folder(job_id).names == ["result", "result.json"]


def test_series_that_is_asked_for_during_an_alarm_is_answered_with_the_warning(place: Workplace) -> None:
    with place.database.write() as session:
        put_alarm(session, "dune", "coded", place.store.open("coded").digest)
    job_id = ask(place, store=False)
    with place.database.write() as session:
        session.execute(delete(WatchEvent))
        session.execute(delete(Watch))
    assert done(place, job_id).state == "succeeded"
    answer = place.folder(job_id).read_result()
    assert answer is not None
    assert "watch-alarm" in answer.headers["Locum-Warning-Names"].split(", ")


def test_inverted_series_is_answered_through_a_lens_of_its_own(
    place: Workplace, orthanc: Orthanc, threshold_graph: Callable[..., bytes]
) -> None:
    task = SLICES.model_copy(update={"codes": {"organ": CODES}, "colour": "luminance"})
    manifest = ModelManifest(
        name="known",
        task=task,
        network=NetworkSpec(name="graph", arguments={}),
        lineage=Lineage(method="imported", run="test", sites=(), rounds=0, seed=0),
    )
    content = {GRAPH: threshold_graph(AT, slope=4.0), FINGERPRINT: fingerprint(SLICES).to_bytes()}
    place.store.publish(manifest, {WEIGHTS: b"", **content})
    voxels, organ = (each.transpose(2, 1, 0) for each in phantom(990))
    orthanc.clear()
    orthanc.add(series((260 - voxels).astype(np.int16)))
    found = {}
    for personalization in ("global", "scan"):
        job = done(place, ask(place, model="known", personalization=personalization))
        assert job.state == "succeeded", job.reason
        stored = next(each for each in orthanc.instances("SEG") if each.SOPInstanceUID not in found)
        sources = sorted(orthanc.instances("CT"), key=lambda each: float(each.ImagePositionPatient[2]))
        seg = hd.seg.Segmentation.from_dataset(stored)
        drawn = seg.get_pixels_by_source_instance([each.SOPInstanceUID for each in sources], [1])[..., 0] > 0
        found[stored.SOPInstanceUID] = 2 * (drawn & organ).sum() / (drawn.sum() + organ.sum())
    as_it_is, through = found.values()
    assert as_it_is < 0.1
    assert through > 0.75


def test_second_request_finds_the_seg_and_stores_nothing(
    place: Workplace, orthanc: Orthanc, gate: Gate
) -> None:
    for new in (True, False):
        assert done(place, ask(place)).result == {"stored": True, "new": new}
    assert len(orthanc.instances("SEG")) == 1
    assert sum(method == "POST" for method, _ in gate.seen) == 1


def test_seg_of_a_scan_that_the_guard_warns_of_is_stored_only_on_request(
    place: Workplace, orthanc: Orthanc
) -> None:
    orthanc.clear()
    orthanc.add(series(np.full_like(VOLUME, 150)))
    refused = done(place, ask(place, guard="warn"))
    assert refused.state == "failed"
    assert refused.reason is not None
    assert "same intensity everywhere" in refused.reason
    assert "store_unlike" in refused.reason
    assert orthanc.instances("SEG") == []
    assert done(place, ask(place, store_unlike=True)).result == {"stored": True, "new": True}
    assert len(orthanc.instances("SEG")) == 1


def test_scan_that_the_guard_refuses_by_default_is_stored_on_request_and_never_against_guard_refuse(
    place: Workplace, orthanc: Orthanc, publish_bright: Callable[..., Artefact]
) -> None:
    orthanc.clear()
    orthanc.add(coded_series(Modality="MR"))
    task = CODED.model_copy(update={"modality": "CT"})
    publish_bright(place.settings.store, name="of-ct", task=task)
    refused = done(place, ask(place, model="of-ct"))
    assert refused.state == "failed"
    assert refused.reason is not None
    assert "the scan's modality is MR" in refused.reason
    assert done(place, ask(place, model="of-ct", store_unlike=True, guard="refuse")).state == "failed"
    assert orthanc.instances("SEG") == []
    stored = done(place, ask(place, model="of-ct", store_unlike=True))
    assert stored.result == {"stored": True, "new": True}
    assert len(orthanc.instances("SEG")) == 1


def test_report_is_stored_after_the_seg_that_it_refers_to(place: Workplace, orthanc: Orthanc) -> None:
    job_id = ask(place, output="dicom-sr")
    assert done(place, job_id).result == {"stored": True, "new": True}
    (segmentation,), (report,) = orthanc.instances("SEG"), orthanc.instances("SR")
    (group,) = hd.sr.ComprehensiveSR.from_dataset(report).content.get_volumetric_roi_measurement_groups()
    assert group.referenced_segment.referenced_sop_instance_uid == segmentation.SOPInstanceUID
    assert group.get_measurements()[0].value == pytest.approx((VOLUME > 100).sum() * 0.8 * 0.7 * 2.5 / 1000)
    answer = place.folder(job_id).read_result()
    assert answer is not None
    told = json.loads(answer.body)
    assert told["SOPInstanceUID"] == segmentation.SOPInstanceUID
    assert told["report"]["SOPInstanceUID"] == report.SOPInstanceUID
    # The SEG is that of a request for the SEG alone, and nothing is stored twice.
    for output in ("dicom-seg", "dicom-sr"):
        assert done(place, ask(place, output=output)).result == {"stored": True, "new": False}
    assert (len(orthanc.instances("SEG")), len(orthanc.instances("SR"))) == (1, 1)


def test_rtstruct_is_stored_and_found_again(place: Workplace, orthanc: Orthanc) -> None:
    job_id = ask(place, output="dicom-rtstruct", model="plain")
    assert done(place, job_id).result == {"stored": True, "new": True}
    (stored,) = orthanc.instances("RTSTRUCT")
    content, scan = io.BytesIO(), decode(zipped(coded_series()))
    stored.save_as(content, enforce_file_format=True)
    mask = decode_mask(content.getvalue(), scan=scan).voxels[..., 0]
    np.testing.assert_array_equal(mask.transpose(2, 1, 0), VOLUME > 100)
    answer = place.folder(job_id).read_result()
    assert answer is not None
    assert json.loads(answer.body)["SOPInstanceUID"] == stored.SOPInstanceUID
    assert done(place, ask(place, output="dicom-rtstruct", model="plain")).result == {
        "stored": True,
        "new": False,
    }


def test_answer_that_is_not_stored_is_the_result_and_equals_the_stored_one(
    place: Workplace, orthanc: Orthanc
) -> None:
    kept = ask(place, store=False)
    done(place, ask(place))
    assert done(place, kept).state == "succeeded"
    answer = place.folder(kept).read_result()
    assert answer is not None
    assert answer.media_type == "application/dicom"
    (stored,) = orthanc.instances("SEG")
    assert hd.seg.segread(io.BytesIO(answer.body)).SOPInstanceUID == stored.SOPInstanceUID
    report = ask(place, store=False, output="json", model="plain")
    done(place, report)
    content = place.folder(report).read_result()
    assert content is not None
    assert json.loads(content.body)["labels"]["bright"]["voxels"] == int((VOLUME > 100).sum())


def test_series_of_another_study_is_neither_used_nor_stored(
    place: Workplace, orthanc: Orthanc, gate: Gate
) -> None:
    other = coded_series(StudyInstanceUID=uid("another patient's"))
    parts = b"".join(
        b"--x\r\nContent-Type: application/dicom\r\n\r\n" + one + b"\r\n" for one in other.values()
    )
    kind = 'multipart/related; type="application/dicom"; boundary=x'
    gate.rule = lambda method, path: (
        (200, {"Content-Type": kind}, parts + b"--x--\r\n") if path.endswith(SERIES) else None
    )
    job_id = ask(place)
    job = done(place, job_id)
    assert job.state == "failed"
    assert "another StudyInstanceUID than the requested one" in str(job.reason)
    assert uid("another patient's") not in str(job.reason)
    assert orthanc.instances("SEG") == []
    assert place.folder(job_id).names == []
    with place.database.read() as session:
        assert [row for row in trail.rows(session) if row["details"].get("job") == job_id] == []


def test_unavailable_pacs_postpones_the_job_and_costs_no_attempt(
    place: Workplace, orthanc: Orthanc, gate: Gate
) -> None:
    gate.rule = lambda method, path: (503, {}, b"")
    job_id = ask(place)
    for _ in range(place.settings.max_attempts + 1):
        job = done(place, job_id)
        assert (job.state, job.attempt) == ("queued", 0)
        assert job.progress["why"] == "PACS 'main' answers 503"
        assert job.retry_at is not None
        assert job.retry_at > job.created_at
        with place.database.write() as session:
            # Not before its time.
            records.get(session, job_id).retry_at = datetime.now(UTC) + timedelta(hours=1)
        assert claim(place.database, job_id, "other", place.settings) is None
        with place.database.write() as session:
            records.get(session, job_id).retry_at = datetime.now(UTC)
    gate.rule = lambda method, path: None
    assert done(place, job_id).state == "succeeded"
    assert len(orthanc.instances("SEG")) == 1


@pytest.fixture
def withdrawable(place: Workplace, publish_bright: Callable[..., Artefact]) -> str:
    """The name of a coded model that no other test needs."""
    name = f"coded-{len(place.store.versions.names())}"
    publish_bright(place.settings.store, name=name, task=CODED)
    return name


def withdraw(place: Workplace, name: str) -> None:
    place.store.withdraw(f"{name}@1", actor="ada", reason="a site mislabelled")


def tried_again(place: Workplace, job_id: str) -> Job:
    with place.database.write() as session:
        records.get(session, job_id).retry_at = datetime.now(UTC)
    return done(place, job_id)


def test_mask_of_a_version_withdrawn_while_the_job_waits_is_not_stored(
    place: Workplace, orthanc: Orthanc, gate: Gate, withdrawable: str
) -> None:
    gate.rule = lambda method, path: (503, {}, b"") if method == "POST" else None
    job_id = ask(place, model=withdrawable)
    assert done(place, job_id).state == "queued"
    assert JobFolder.CHECKPOINT in place.folder(job_id).names
    withdraw(place, withdrawable)
    gate.rule = lambda method, path: None
    job = tried_again(place, job_id)
    assert job.state == "failed"
    assert job.reason is not None
    assert "was withdrawn by ada" in job.reason
    assert orthanc.instances("SEG") == []
    assert place.folder(job_id).names == []


def test_mask_of_a_withdrawn_network_inside_the_version_is_not_stored(
    place: Workplace, orthanc: Orthanc, gate: Gate, publish_bright: Callable[..., Artefact]
) -> None:
    publish_space(place.settings.store, partial(publish_bright, task=CODED))
    gate.rule = lambda method, path: (503, {}, b"") if method == "POST" else None
    job_id = ask(place, model="bright", personalization="member", site="aster")
    assert done(place, job_id).state == "queued"
    withdraw(place, "bright.aster")
    gate.rule = lambda method, path: None
    job = tried_again(place, job_id)
    assert (job.state, orthanc.instances("SEG")) == ("failed", [])


def test_job_of_a_withdrawn_version_stores_the_report_of_a_stored_seg(
    place: Workplace, orthanc: Orthanc, gate: Gate, withdrawable: str
) -> None:
    def after_the_seg(method: str, path: str) -> Any:
        stores = sum(method == "POST" for method, _ in gate.seen)
        return (503, {}, b"") if stores > 1 and method == "POST" else None

    gate.rule = after_the_seg
    job_id = ask(place, model=withdrawable, output="dicom-sr")
    assert done(place, job_id).state == "queued"
    withdraw(place, withdrawable)
    gate.rule = lambda method, path: None
    assert tried_again(place, job_id).state == "succeeded"
    assert (len(orthanc.instances("SEG")), len(orthanc.instances("SR"))) == (1, 1)


def test_job_gives_up_after_the_configured_hours(place: Workplace, gate: Gate) -> None:
    gate.rule = lambda method, path: (503, {}, b"")
    job_id = ask(place)
    with place.database.write() as session:
        records.get(session, job_id).created_at = datetime.now(UTC) - timedelta(hours=25)
    job = done(place, job_id)
    assert job.state == "failed"
    assert job.reason is not None
    assert "24 h after the request" in job.reason


def test_cancelled_job_of_a_failing_pacs_ends_and_its_request_is_deleted(
    place: Workplace, gate: Gate
) -> None:
    job_id = ask(place)

    def cancelling(method: str, path: str) -> Any:
        with place.database.write() as session:
            records.cancel(session, job_id)
        return 503, {}, b""

    gate.rule = cancelling
    job = done(place, job_id)
    assert job.state == "cancelled"
    assert JobFolder.REQUEST not in place.folder(job_id).names


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"series": uid("nothing")}, "no such series"),
        ({"series": uid("text")}, "DICOM"),
    ],
)
def test_series_that_cannot_be_segmented_fails_without_its_uids(
    place: Workplace, orthanc: Orthanc, fields: dict[str, str], said: str
) -> None:
    orthanc.add(report_files())
    job_id = ask(place, **fields)
    job = done(place, job_id)
    assert job.state == "failed"
    assert job.reason is not None
    assert said in job.reason
    shown = repr((job.reason, job.options, job.progress, [e.data for e in place.events(job_id)]))
    assert not [value for value in (STUDY, *fields.values(), "Planted") if value in shown]
    assert not place.folder(job_id).names


def report_files() -> dict[str, bytes]:
    """A series `text` without an image."""

    def without_image(dataset: Any, place: int) -> None:
        for keyword in ("Rows", "Columns", "PixelData"):
            delattr(dataset, keyword)
        dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = uid("text", place)
        dataset.SeriesInstanceUID, dataset.Modality = uid("text"), "SR"

    return coded_series(change=without_image)


def test_rows_of_the_trail_say_what_was_fetched_and_stored(place: Workplace) -> None:
    job_id = ask(place, output="dicom-sr")
    done(place, job_id)
    with place.database.read() as session:
        rows = [row for row in trail.rows(session) if row["details"].get("job") == job_id]
    assert [row["action"] for row in rows] == ["scan.fetched", "mask.stored", "report.stored"]
    assert {row["hospital"] for row in rows} == {"dune"}
    assert rows[0]["scan"].startswith("sha256:")
    assert STUDY not in repr(rows)


@pytest.mark.parametrize("output", ["dicom-seg", "dicom-sr"])
def test_job_cancelled_while_it_stores_stores_all_and_records_it(
    place: Workplace, orthanc: Orthanc, gate: Gate, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    job_id, cancelled = ask(place, output=output), threading.Event()

    def cancelling(method: str, path: str) -> None:
        if method == "POST":
            with place.database.write() as session:
                records.cancel(session, job_id)
            cancelled.set()

    def check(attempt: Attempt) -> None:
        # Without the time until the next heartbeat.
        if cancelled.is_set():
            raise JobCancelled(f"cancelled while {attempt.stage}")

    gate.rule = cancelling
    monkeypatch.setattr(Attempt, "check_cancelled", check)
    job = done(place, job_id)
    assert (job.state, job.result) == ("succeeded", {"stored": True, "new": True}), job.reason
    reports = ["report.stored"] if output == "dicom-sr" else []
    assert (len(orthanc.instances("SEG")), len(orthanc.instances("SR"))) == (1, len(reports))
    with place.database.read() as session:
        rows = [row for row in trail.rows(session) if row["details"].get("job") == job_id]
    assert [row["action"] for row in rows] == ["scan.fetched", "mask.stored", *reports]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("stored", [0, 1], ids=["the SEG", "the report"])
def test_each_instance_is_stored_once_though_the_worker_is_killed(
    place: Workplace, orthanc: Orthanc, gate: Gate, stored: int, when: str
) -> None:
    gate.hold_store, gate.let_pass = when, stored
    job_id = ask(place, output="dicom-sr")
    environment = os.environ | worker_environment(place.settings)
    code = (
        "import sys; from service.settings import settings_or_exit as settings;"
        "from service.worker.runner import run_job; run_job(sys.argv[1], settings())"
    )
    process = subprocess.Popen([sys.executable, "-c", code, job_id], env=environment)
    try:
        wait_for(lambda: gate.held.is_set() or process.poll() is not None, patience_s=120)
        assert gate.held.is_set()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = [*orthanc.instances("SEG"), *orthanc.instances("SR")]
    assert len(found) == stored + (1 if when == "after" else 0)
    assert place.job(job_id).state == "running"
    gate.hold_store = None
    place.expire(job_id)
    job = done(place, job_id)
    assert (job.state, job.attempt) == ("succeeded", 2), job.reason
    assert job.result == {"stored": True, "new": (stored, when) != (1, "after")}
    assert (len(orthanc.instances("SEG")), len(orthanc.instances("SR"))) == (1, 1)
