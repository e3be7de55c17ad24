"""`personalization=scan`: the job behind it, and waiting for its mask."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from model_store import guard
from model_store.artefact import Artefact
from model_store.digest import sha256
from model_store.manifest import GRAPH, SCAN_GRAPH, SHIFT_GRAPH
from model_store.scan import decode
from model_store.scans import formats
from model_store.store import Store
from service.database.job_states import JobEnd
from service.jobs import leases, records
from service.jobs.files import JobFolder, StoredResult
from tests.helpers.model_store.dicom_files import zipped
from tests.helpers.service.adapted_store import publish_adapted, publish_space
from tests.helpers.service.api import sent
from tests.helpers.service.coded import CODED, SERIES, STUDY, coded_series
from tests.helpers.waiting import wait_for

Publish = Callable[..., Artefact]
RESULT = StoredResult(b"a mask", "image/png", {"Locum-Model": "bright@1", "Locum-Personalization": "scan"})
# Far longer than anything here takes, unless it hangs.
LONG = "50"


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, publish_bright: Publish) -> Any:
    """On bright@1, bright.at-dune@1 and plain@1, with the hospital dune; there is no Redis."""
    root = tmp_path_factory.mktemp("store")
    space = publish_space(root, publish_bright)
    publish_adapted(root, publish_bright, space, "dune", 120)
    publish_bright(root, "plain")
    api = start(root)
    assert api.client.put("/hospitals/dune", json={"name": "Dune"}).status_code == 201
    return api


@pytest.fixture(scope="module")
def scan(make_png: Callable[..., bytes], picture: Any) -> bytes:
    return make_png(picture)


def ask(api: Any, scan: bytes, prefer: str | None = None, **fields: str) -> httpx.Response:
    answer: httpx.Response = api.client.post(
        "/segment",
        files={"scan": ("scan", scan)},
        data={"model": "bright", "personalization": "scan", **fields},
        headers={} if prefer is None else {"Prefer": prefer},
    )
    return answer


def queued(api: Any) -> list[str]:
    with api.context.database.read() as session:
        return [job.id for job in records.listed(session, state="queued")]


def jobs_with_files(api: Any) -> list[str]:
    return [folder.name for folder in (api.settings.state_dir / "jobs").glob("*")]


@pytest.fixture(autouse=True)
def nothing_left(api: Any) -> Any:
    """A job of one test is not another's."""
    yield
    with api.context.database.write() as session:
        found = [job.id for job in records.listed(session)]
        for job_id in found:
            records.cancel(session, job_id)
    for job_id in found:
        JobFolder(api.settings.open_files(), job_id).delete()


def work(api: Any, state: JobEnd = "succeeded", reason: str | None = None) -> threading.Thread:
    """A worker, which takes the next job that comes and ends it so."""

    def run() -> None:
        deadline = time.monotonic() + 30
        while not (found := queued(api)):
            assert time.monotonic() < deadline, "no job came"
            time.sleep(0.01)
        lease = leases.claim(api.context.database, found[0], "test", api.settings)
        assert lease is not None
        folder = JobFolder(api.settings.open_files(), found[0])
        assert folder.read(folder.INPUT) is not None
        if state in ("succeeded", "fell_back"):
            folder.write_result(RESULT)
        leases.finish(api.context.database, lease, state, reason=reason)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_scan_personalization_is_accepted_as_a_job_with_scan_and_options(api: Any, scan: bytes) -> None:
    answer = ask(api, scan, hospital="dune", output="overlay", guard="refuse")
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == f"/jobs/{job['id']}"
    assert "preference-applied" not in answer.headers
    assert (job["kind"], job["state"], job["hospital"]) == ("scan", "queued", "dune")
    assert (job["model"], job["parent"]) == ("bright", api.store.open("bright@1").digest)
    assert job["options"]["output"] == "overlay"
    assert job["options"]["guard"] == "refuse"
    assert job["request"] == answer.headers["locum-request"]
    folder = JobFolder(api.settings.open_files(), job["id"])
    assert folder.read(folder.INPUT) == scan
    path = api.settings.state_dir / "jobs" / job["id"] / folder.INPUT
    assert path.stat().st_mode & 0o077 == 0
    assert api.client.get(answer.headers["location"]).json()["id"] == job["id"]
    card = api.client.get(f"/jobs/{job['id']}/card").text
    assert "Nothing is kept" in card
    assert 'http-equiv="refresh"' in card


@pytest.mark.parametrize("output", ["json", "nifti", "dicom-seg", "dicom-sr", "dicom-rtstruct"])
def test_waiting_scan_has_its_patient_only_where_the_answer_repeats_it(
    start: Callable[..., Any], tmp_path: Path, publish_bright: Publish, output: str
) -> None:
    publish_space(tmp_path / "store", partial(publish_bright, task=CODED))
    api, scan = start(tmp_path / "store"), zipped(coded_series())
    answer = ask(api, scan, output=output)
    assert answer.status_code == 202, answer.text
    kept = JobFolder(api.settings.open_files(), answer.json()["id"]).read_input()
    assert kept is not None
    assert (kept.received_sha256, kept.received_bytes) == (sha256(scan), len(scan))
    if output.startswith("dicom"):
        assert kept.content == scan
    else:
        np.testing.assert_array_equal(decode(kept.content).voxels, decode(scan).voxels)
        for planted in (b"Planted", b"PLANTED", STUDY.encode(), SERIES.encode(), b"19610203"):
            assert planted not in kept.content


def test_scan_job_keeps_the_chosen_series_alone(
    start: Callable[..., Any], tmp_path: Path, publish_bright: Publish
) -> None:
    publish_space(tmp_path / "store", partial(publish_bright, task=CODED))
    api, chosen = start(tmp_path / "store"), coded_series()
    other = coded_series(SeriesNumber=7, SeriesInstanceUID="1.2.7", RescaleIntercept=50)
    study = zipped({**chosen, **{f"other/{name}": content for name, content in other.items()}})
    assert ask(api, study).status_code == 415
    answer = ask(api, study, series=SERIES)
    assert answer.status_code == 202, answer.text
    assert SERIES not in answer.text
    kept = JobFolder(api.settings.open_files(), answer.json()["id"]).read_input()
    assert kept is not None
    assert (kept.received_sha256, kept.series) == (sha256(study), SERIES)
    np.testing.assert_array_equal(decode(kept.content).voxels, decode(zipped(chosen)).voxels)


@pytest.mark.parametrize("at_once", [SHIFT_GRAPH, SCAN_GRAPH, None])
def test_scan_request_resolves_its_version_and_reads_its_scan_once(
    start: Callable[..., Any],
    tmp_path: Path,
    publish_bright: Publish,
    scan: bytes,
    monkeypatch: pytest.MonkeyPatch,
    at_once: str | None,
) -> None:
    space, calls = publish_space(tmp_path / "store", publish_bright), Counter[str]()
    if at_once:
        store = Store(tmp_path / "store")
        store.publish(space.manifest, {at_once: store.by_digest(space.manifest.global_model).read(GRAPH)})
    api = start(tmp_path / "store")

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            calls[name] += 1
            return function(*given, **named)

        return call

    # Below every module that could ask for them again.
    monkeypatch.setattr(Store, "open", counted("resolved", Store.open))
    monkeypatch.setattr(guard, "ScanSummary", counted("guarded", guard.ScanSummary))
    reading = [replace(each, read=counted("decoded", each.read)) for each in formats.FORMATS]
    monkeypatch.setattr(formats, "FORMATS", tuple(reading))
    answer = ask(api, scan)
    assert answer.status_code == (200 if at_once else 202), answer.text
    assert calls == {"resolved": 1, "decoded": 1, "guarded": 1}
    if at_once:
        assert answer.content == api.segment(scan, model="bright", personalization="global").content


def test_prefer_wait_returns_the_mask_and_deletes_its_files(api: Any, scan: bytes) -> None:
    worker = work(api)
    answer = ask(api, scan, f"respond-async, wait={LONG}")
    worker.join()
    assert (answer.status_code, answer.content) == (200, RESULT.body)
    assert answer.headers["content-type"] == RESULT.media_type
    assert answer.headers["preference-applied"] == f"wait={LONG}"
    assert answer.headers["locum-personalization"] == "scan"
    # It was handed over: nothing of it is kept, not even until it would expire.
    assert jobs_with_files(api) == []


def test_scan_job_that_fell_back_returns_its_mask(api: Any, scan: bytes) -> None:
    worker = work(api, "fell_back", "no epoch was better than step 0")
    answer = ask(api, scan, f"wait={LONG}")
    worker.join()
    assert (answer.status_code, answer.content) == (200, RESULT.body)


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_scan_job_that_ended_without_a_mask_is_409_with_the_reason(
    api: Any, scan: bytes, state: JobEnd
) -> None:
    worker = work(api, state, "the network diverged")
    answer = ask(api, scan, f"wait={LONG}")
    worker.join()
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:locum:problem:job-without-result")
    assert "the network diverged" in answer.json()["detail"]


@pytest.mark.parametrize("wait", ["0", "1"])
def test_prefer_wait_that_expires_is_202_with_a_location(api: Any, scan: bytes, wait: str) -> None:
    answer = ask(api, scan, f"wait={wait}")
    assert answer.status_code == 202
    assert answer.headers["preference-applied"] == f"wait={wait}"
    assert answer.headers["location"] == f"/jobs/{answer.json()['id']}"
    assert answer.json()["state"] == "queued"


def test_scan_job_result_is_kept_until_its_files_are_deleted(api: Any, scan: bytes) -> None:
    location = ask(api, scan).headers["location"]
    assert api.client.get(f"{location}/result").status_code == 409
    work(api).join()
    result = api.client.get(f"{location}/result")
    assert (result.status_code, result.content) == (200, RESULT.body)
    assert api.client.delete(f"{location}/files").status_code == 204
    assert api.client.get(f"{location}/result").status_code == 410


def test_client_disconnect_while_waiting_cancels_the_job(api: Any, scan: bytes) -> None:
    with sent(
        api,
        files={"scan": ("scan", scan)},
        data={"model": "bright", "personalization": "scan"},
        headers={"Prefer": f"wait={LONG}"},
    ):
        wait_for(lambda: queued(api))
    wait_for(lambda: not queued(api) and not jobs_with_files(api))
    newest = api.client.get("/jobs", params={"limit": 1}).json()["jobs"][0]
    assert newest["state"] == "cancelled"
    kept_until = api.client.get(f"/jobs/{newest['id']}").json()["files_expire_at"]
    assert datetime.fromisoformat(kept_until) <= datetime.now(UTC)


def test_service_answers_other_requests_while_a_client_waits(api: Any, scan: bytes) -> None:
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(api, scan, f"wait={LONG}")))
    waiting.start()
    deadline = time.monotonic() + 30
    while not queued(api):
        assert time.monotonic() < deadline, "no job came"
    assert api.segment(scan, model="plain").status_code == 200
    assert answers == []
    work(api).join()
    waiting.join()
    assert answers[0].status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "slug"),
    [
        ({"model": "plain", "preset": "as-published"}, 422, "not-adaptable"),
        ({"model": "bright.aster"}, 422, "part-of-a-model"),
        ({"model": "nothing"}, 404, "artefact-not-found"),
        ({"hospital": "nobody"}, 404, "hospital-unknown"),
        ({"site": "aster"}, 422, "contradiction"),
        ({"routing": "slice"}, 422, "contradiction"),
        ({"personalization": "global", "preset": "statistics"}, 422, "contradiction"),
        ({"personalization": "auto", "shape_weight": "0"}, 422, "contradiction"),
        ({"preset": "entropy"}, 422, "invalid-request"),
        ({"shape_weight": "-1"}, 422, "invalid-request"),
        ({"output": "nifti"}, 422, "output-mismatch"),
        ({"output": "gif"}, 422, "invalid-request"),
    ],
)
def test_invalid_scan_personalization_is_rejected_and_leaves_no_job(
    api: Any, scan: bytes, fields: dict[str, str], status: int, slug: str
) -> None:
    answer = ask(api, scan, **fields)
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:locum:problem:{slug}")
    assert queued(api) == []
    assert jobs_with_files(api) == []


def test_scan_personalization_with_a_full_queue_is_503(
    api: Any, scan: bytes, start: Callable[..., Any]
) -> None:
    crowded = start(api.settings.store, max_waiting_jobs=1)
    assert crowded.client.put("/hospitals/dune", json={"name": "Dune"}).status_code == 201
    first = ask(crowded, scan, hospital="dune").json()["id"]
    second = ask(crowded, scan, hospital="dune")
    assert (second.status_code, second.json()["type"]) == (503, "urn:locum:problem:queue-full")
    sent = crowded.client.post(
        "/hospitals/dune/adaptations", data={"model": "bright"}, files={"scans": ("scan", scan)}
    )
    assert (sent.status_code, sent.json()["type"]) == (503, "urn:locum:problem:queue-full")
    assert queued(crowded) == jobs_with_files(crowded) == [first]
    assert [path for path in (crowded.settings.state_dir / "cohorts").rglob("*") if path.is_file()] == []
    assert crowded.client.get("/hospitals/dune/cohorts").json()["cohorts"] == []


def test_scan_personalization_of_an_invalid_scan_is_rejected(
    api: Any, scan: bytes, make_nifti: Callable[..., bytes]
) -> None:
    assert ask(api, b"not a scan").status_code == 415
    assert ask(api, scan[:60]).status_code == 422
    assert queued(api) == []


def test_scan_personalization_of_an_adapted_version_starts_from_its_parent(api: Any, scan: bytes) -> None:
    for model in ("bright", "bright.at-dune@1"):
        answer = ask(api, scan, model=model, hospital="dune")
        assert answer.json()["parent"] == api.store.open("bright@1").digest
        assert answer.json()["model"] == "bright"
