"""Jobs over HTTP: accepted once, cancelled, and what came of them. The worker here is the test."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from service.database import Job
from service.expiry import expire
from service.jobs.files import JobFolder, StoredResult
from service.jobs.leases import claim, finish, renew
from tests.helpers.service.asking import adapt, note, problem, submitted, take
from tests.helpers.service.queued import queued

COEFFICIENTS = {"layers": ["encoder.0"], "models": ["north", "global"], "values": [[0.5, 0.5]]}
GATE = {"passed": True, "checks": []}


def send(api: Any, scans: list[bytes], key: str | None = None, **fields: str) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    files = [("scans", (f"mueller-{number}.png", scan)) for number, scan in enumerate(scans)]
    answer: httpx.Response = api.client.post(
        "/hospitals/north/adaptations", files=files, data={"model": "brain", **fields}, headers=headers
    )
    return answer


def test_adaptation_job_reports_every_state_up_to_its_candidate(api: Any, cohort: str) -> None:
    accepted = adapt(api, cohort, options={"epochs": 2, "seed": 7})
    assert accepted.status_code == 202
    place = accepted.headers["location"]
    found = api.client.get(place).json()
    assert found == accepted.json()
    assert place == f"/jobs/{found['id']}"
    assert (found["kind"], found["state"], found["hospital"], found["model"]) == (
        "adaptation",
        "queued",
        "north",
        "brain",
    )
    assert found["parent"] == api.store.open("brain").digest
    assert found["request"] == accepted.headers["locum-request"]
    assert (found["options"]["epochs"], found["options"]["seed"]) == (2, 7)
    # Every option is written down, so that the run can be repeated whatever the defaults become.
    assert found["options"]["preset"] == "auto"
    assert isinstance(found["queue_position"], int)

    assert "no worker" in found["no_worker"]

    lease = take(api, found["id"])
    assert api.client.get(place).json()["no_worker"] is None
    note(api, lease, "progress", {"stage": "adapting", "epoch": 1, "epochs": 2})
    note(api, lease, "epoch", {"epoch": 1, "loss": 0.9, "safe": True, "coefficients": None})
    # Repeated by an attempt that took over before the checkpoint.
    note(api, lease, "epoch", {"epoch": 1, "loss": 0.8, "safe": True, "coefficients": COEFFICIENTS})
    running = api.client.get(place).json()
    assert (running["state"], running["attempt"], running["queue_position"]) == ("running", 1, None)
    assert running["progress"] == {"stage": "adapting", "epoch": 1, "epochs": 2}
    assert running["epochs"] == [{"epoch": 1, "loss": 0.8, "safe": True}]
    assert running["coefficients"] == COEFFICIENTS

    candidate = ("brain.at-north", 1, "sha256:" + "1" * 64)
    finish(api.context.database, lease, "succeeded", gate=GATE, candidate=candidate)
    over = api.client.get(place).json()
    assert (over["state"], over["reason"], over["gate"]) == ("succeeded", None, GATE)
    assert over["candidate"]["reference"] == "brain.at-north@1"
    assert over["finished_at"] < over["files_expire_at"]


def test_jobs_are_listed_by_hospital_and_state(api: Any, cohort: str) -> None:
    first, second = submitted(api, cohort), submitted(api, cohort)
    take(api, first)
    listed = api.client.get("/jobs", params={"hospital": "north", "limit": 2}).json()["jobs"]
    assert [job["id"] for job in listed] == [second, first]
    running = api.client.get("/jobs", params={"state": "running"}).json()["jobs"]
    assert first in [job["id"] for job in running]
    assert second not in [job["id"] for job in running]
    assert api.client.get("/jobs", params={"hospital": "south"}).json() == {"jobs": [], "next": None}
    assert problem(api.client.get("/jobs", params={"state": "happy"})) == (422, "invalid-request")


def test_idempotency_key_replays_one_job_and_rejects_another_request(api: Any, cohort: str) -> None:
    first = adapt(api, cohort, key="k1", options={"epochs": 3})
    again = adapt(api, cohort, key="k1", options={"epochs": 3})
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.headers["location"] == first.headers["location"]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    # However far the job is by then.
    finish(api.context.database, take(api, first.json()["id"]), "failed", reason="by hand")
    assert adapt(api, cohort, key="k1", options={"epochs": 3}).json()["state"] == "failed"
    other = adapt(api, cohort, key="k1", options={"epochs": 4})
    assert problem(other) == (422, "idempotency-key-reused")
    assert (
        adapt(api, cohort, key="k2", options={"epochs": 3}).headers["location"] != first.headers["location"]
    )


def test_concurrent_requests_with_one_key_make_one_job_and_cohort(api: Any, scans: list[bytes]) -> None:
    places: list[str] = []
    cohorts_before = len(api.client.get("/hospitals/north/cohorts").json()["cohorts"])

    def post() -> None:
        with httpx.Client(base_url=api.client.base_url, timeout=60) as client:
            answer = client.post(
                "/hospitals/north/adaptations",
                files=[("scans", ("a", scan)) for scan in scans[:2]],
                data={"model": "brain"},
                headers={"Idempotency-Key": "at-once"},
            )
            places.append(answer.headers.get("location", answer.text))

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(places) == 4
    assert len(set(places)) == 1
    with api.context.database.read() as session:
        query = select(func.count()).select_from(Job).where(Job.idempotency_key == "at-once")
        assert session.scalar(query) == 1
    # And keeps one copy of the scans.
    assert len(api.client.get("/hospitals/north/cohorts").json()["cohorts"]) == cohorts_before + 1


def test_scans_sent_with_the_request_become_a_cohort(api: Any, scans: list[bytes]) -> None:
    accepted = send(api, scans, options=json.dumps({"epochs": 1}))
    assert accepted.status_code == 202, accepted.text
    job = accepted.json()
    assert job["options"]["epochs"] == 1
    kept = api.client.get(f"/hospitals/north/cohorts/{job['cohort']}/scans").json()["scans"]
    assert [scan["name"] for scan in kept] == [f"{n:04d}" for n in range(1, len(scans) + 1)]
    folder = api.settings.state_dir / "cohorts" / job["cohort"]
    assert sorted(path.read_bytes() for path in folder.iterdir()) == sorted(scans)


@pytest.mark.parametrize("key", ["again", None])
def test_repeated_scans_with_a_key_reuse_the_job(api: Any, scans: list[bytes], key: str | None) -> None:
    first, second = send(api, scans[:2], key), send(api, scans[:2], key)
    assert (first.json()["id"] == second.json()["id"]) is (key is not None)
    if key is not None:
        assert problem(send(api, scans[:3], key)) == (422, "idempotency-key-reused")


def test_rejected_scans_leave_no_files_and_jobs(api: Any, scans: list[bytes]) -> None:
    def kept() -> list[Path]:
        return sorted(path for path in (api.settings.state_dir / "cohorts").rglob("*") if path.is_file())

    before, jobs = kept(), api.client.get("/jobs", params={"limit": 1000}).json()
    assert problem(send(api, [scans[0], b"no scan"])) == (415, "unsupported-scan")
    assert problem(send(api, []))[0] in (415, 422)
    assert problem(send(api, scans * 2)) == (422, "malformed-form")
    assert problem(send(api, scans[:2], options="{")) == (422, "invalid-request")
    assert problem(send(api, scans[:2], surprise="1")) == (422, "invalid-request")
    assert problem(send(api, scans[:2], model="bright", options='{"preset": "masks"}')) == (
        422,
        "masks-missing",
    )
    assert problem(send(api, [scans[0] + b"x" * 70_000])) == (413, "upload-too-large")
    assert kept() == before
    assert api.client.get("/jobs", params={"limit": 1000}).json() == jobs


def test_invalid_adaptation_request_is_rejected_with_its_problem_type(api: Any, cohort: str) -> None:
    def refused(path: str = "/hospitals/north/adaptations", **body: Any) -> tuple[int, str]:
        return problem(api.client.post(path, json={"cohort": cohort, "model": "brain", **body}))

    assert refused(model="bright", options={"preset": "masks"}) == (422, "masks-missing")
    assert refused(model="lung") == (404, "artefact-not-found")
    assert refused(model=None) == (422, "model-not-named")
    assert refused(cohort="0" * 32) == (404, "cohort-unknown")
    assert refused(path="/hospitals/south/adaptations") == (404, "cohort-unknown")
    assert refused(path="/hospitals/nowhere/adaptations") == (404, "hospital-unknown")
    assert refused(options={"epochs": 0}) == (422, "invalid-request")
    assert refused(options={"speed": 1}) == (422, "invalid-request")
    answer = adapt(api, cohort, options={"epochs": 0})
    assert answer.json()["errors"][0]["field"] == "body.options.epochs"
    empty = api.client.post("/hospitals/north/cohorts").json()["id"]
    assert refused(cohort=empty) == (422, "cohort-empty")
    malformed = api.client.post("/hospitals/north/adaptations", content=b"{")
    assert problem(malformed) == (422, "invalid-request")


def test_deleting_a_queued_job_cancels_it_at_once(api: Any, cohort: str) -> None:
    job = submitted(api, cohort)
    folder = JobFolder(api.settings.open_files(), job)
    folder.write(folder.INPUT, b"a scan")
    cancelled = api.client.delete(f"/jobs/{job}")
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert cancelled.json()["reason"] == "cancelled before it began"
    assert not folder.names
    assert claim(api.context.database, job, "late", api.settings) is None
    assert api.client.delete(f"/jobs/{job}").json() == cancelled.json()


def test_deleting_a_running_job_is_202_and_requests_cancellation(api: Any, cohort: str) -> None:
    job = submitted(api, cohort)
    lease = take(api, job)
    told = api.client.delete(f"/jobs/{job}")
    assert (told.status_code, told.json()["state"]) == (202, "cancelling")
    assert renew(api.context.database, lease).cancel
    finish(api.context.database, lease, "cancelled", reason="cancelled while adapting")
    assert api.client.get(f"/jobs/{job}").json()["reason"] == "cancelled while adapting"


def test_deleting_an_ended_job_keeps_its_state(api: Any, cohort: str) -> None:
    job = submitted(api, cohort)
    finish(api.context.database, take(api, job), "succeeded")
    answer = api.client.delete(f"/jobs/{job}")
    assert (answer.status_code, answer.json()["state"]) == (200, "succeeded")


def test_deleting_a_cohort_of_a_waiting_job_is_409(api: Any, cohort: str) -> None:
    job = submitted(api, cohort)
    place = f"/hospitals/north/cohorts/{cohort}"
    assert problem(api.client.delete(place)) == (409, "cohort-in-use")
    api.client.delete(f"/jobs/{job}")
    assert api.client.delete(place).status_code == 204
    assert problem(adapt(api, cohort)) == (410, "cohort-gone")


def scan_job(api: Any) -> str:
    with api.context.database.write() as session:
        asked = {"kind": "scan", "hospital": None, "model": "brain", "parent": "sha256:" + "0" * 64}
        return queued(session, api.settings, **asked).id


def test_scan_job_result_is_its_mask_until_the_files_are_deleted(api: Any) -> None:
    job = scan_job(api)
    assert problem(api.client.get(f"/jobs/{job}/result")) == (409, "job-not-over")
    assert problem(api.client.delete(f"/jobs/{job}/files")) == (409, "job-not-over")
    lease = take(api, job)
    folder = JobFolder(api.settings.open_files(), job)
    folder.write_result(StoredResult(b"mask", "image/png", {"Locum-Model": "brain@1"}))
    assert problem(api.client.get(f"/jobs/{job}/result")) == (409, "job-not-over")
    finish(api.context.database, lease, "succeeded")
    answer = api.client.get(f"/jobs/{job}/result")
    assert (answer.status_code, answer.content) == (200, b"mask")
    assert (answer.headers["content-type"], answer.headers["locum-model"]) == ("image/png", "brain@1")
    assert api.client.delete(f"/jobs/{job}/files").status_code == 204
    assert not folder.names
    assert problem(api.client.get(f"/jobs/{job}/result")) == (410, "files-deleted")
    assert api.client.get(f"/jobs/{job}").json()["state"] == "succeeded"


@pytest.mark.parametrize("how", ["its files are deleted", "it is cancelled"])
def test_files_written_after_a_job_ended_are_deleted(api: Any, how: str) -> None:
    job, database = scan_job(api), api.context.database
    folder = JobFolder(api.settings.open_files(), job)
    if how == "it is cancelled":
        assert api.client.delete(f"/jobs/{job}").json()["state"] == "cancelled"
    else:
        finish(database, take(api, job), "failed", reason="the scan is all noise")
        assert api.client.delete(f"/jobs/{job}/files").status_code == 204
    folder.write("pictures/before-1.png", b"a patient, drawn by a worker that had been stopped")
    expire(database, api.settings)
    assert not folder.names


def test_result_of_a_job_without_a_mask_is_rejected_with_the_reason(api: Any, cohort: str) -> None:
    job = scan_job(api)
    finish(api.context.database, take(api, job), "failed", reason="the scan is all noise")
    answer = api.client.get(f"/jobs/{job}/result")
    assert problem(answer) == (409, "job-without-result")
    assert "the scan is all noise" in answer.json()["detail"]
    assert problem(api.client.get(f"/jobs/{submitted(api, cohort)}/result")) == (404, "no-result")
    assert problem(api.client.get(f"/jobs/{'0' * 32}")) == (404, "job-unknown")
    assert problem(api.client.get("/jobs/7")) == (422, "invalid-request")
