"""Adaptation jobs over HTTP, with a real Redis and a real Celery worker that is really killed."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import psutil
import pytest

from benchmarks.harness.forked import Forked
from service.adaptation import scan_requests
from service.runtime.embedded_worker import worker_command, worker_environment
from tests.helpers import waiting
from tests.helpers.service.routing_federation import outside_scans
from tests.helpers.service.workplace import Workplace, opened

PATIENCE_SECONDS = 120
wait_for = partial(waiting.wait_for, patience_s=PATIENCE_SECONDS, pause_s=0.05)
TERMINAL = ("succeeded", "fell_back", "failed", "cancelled")


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, routing_store: Path) -> Any:
    store = tmp_path_factory.mktemp("worker") / "store"
    shutil.copytree(routing_store, store)
    # Jobs go by the queue of their device class.
    running = start(store, redis_url=None, jobs_on="cpu", lease_seconds=5, reconcile_every_seconds=0.2)
    assert running.client.put("/hospitals/dune", json={"name": "Dune"}).status_code == 201
    return running


@pytest.fixture(scope="module")
def worker(api: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[psutil.Process]:
    environment = os.environ | worker_environment(api.settings)
    environment.pop("LOCUM_REDIS_URL", None)
    log = tmp_path_factory.mktemp("log") / "worker.log"
    process = Forked("service.worker", worker_command()[3:], log, environment)
    try:
        yield psutil.Process(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
        # Celery tells of the process that was killed; nothing else may have gone wrong.
        wrong = [line for line in log.read_text().splitlines() if "Traceback" in line]
        assert all("WorkerLostError" in line for line in wrong)
    finally:
        process.kill()
        process.wait()


def submit(api: Any, scans: int, **options: Any) -> str:
    cohort = api.client.post("/hospitals/dune/cohorts").json()["id"]
    for name, data in outside_scans(scans).items():
        uploaded = api.client.put(f"/hospitals/dune/cohorts/{cohort}/scans/{name}", content=data)
        assert uploaded.status_code == 201
    body = {"cohort": cohort, "model": "organ", "options": {"preset": "paper", **options}}
    accepted = api.client.post("/hospitals/dune/adaptations", json=body)
    assert accepted.status_code == 202, accepted.text
    location: str = accepted.headers["Location"]
    return location


def job_at(api: Any, location: str) -> dict[str, Any]:
    found: dict[str, Any] = api.client.get(location).json()
    return found


def ended(api: Any, location: str) -> dict[str, Any]:
    wait_for(lambda: job_at(api, location)["state"] in TERMINAL)
    return job_at(api, location)


def test_cancelled_job_ends_and_the_next_job_runs(
    api: Any, worker: psutil.Process, routing_store: Path
) -> None:
    endless = submit(api, 1, epochs=200)
    following = submit(api, 1, epochs=1)
    wait_for(lambda: len(job_at(api, endless)["epochs"]) > 1)
    assert job_at(api, following)["state"] == "queued"
    assert api.client.delete(endless).status_code == 202
    cancelled = ended(api, endless)
    assert (cancelled["state"], cancelled["candidate"]) == ("cancelled", None)
    assert cancelled["reason"] == "cancelled while adapting"
    done = ended(api, following)
    assert (done["state"], done["reason"]) == ("succeeded", None)
    assert (done["device_class"], done["result"]["computed_on"]["device"]) == ("cpu", "cpu")
    assert [epoch["epoch"] for epoch in done["epochs"]] == [0, 1]
    assert done["coefficients"]["models"] == ["aster", "birch", "global"]
    # The candidate opens, and answers a caller that asks for it by name.
    reference = done["candidate"]["reference"]
    assert reference == "organ.at-dune@1"
    assert api.store.open(reference).digest == done["candidate"]["digest"]
    (scan,) = outside_scans(1).values()
    answer: httpx.Response = api.segment(scan, model=reference)
    assert answer.status_code == 200
    assert answer.headers["Locum-Model"] == reference


def test_killed_worker_loses_at_most_one_epoch_and_the_result_is_equal(
    api: Any, worker: psutil.Process, tmp_path: Path, routing_store: Path
) -> None:
    epochs = 5
    location = submit(api, 1, epochs=epochs)
    job_id = location.rsplit("/", 1)[1]
    here = Workplace(api.settings, api.context.database)

    def kill() -> bool:
        # While this test writes, the worker does not: what was seen of it holds until it is killed.
        with api.context.database.write() as session:
            session.connection()
            if len(here.events(job_id, "epoch")) < 2:
                return False
            owner = here.job(job_id).owner
            assert owner is not None
            killed = psutil.Process(int(owner.rsplit(":", 1)[1]))
            assert killed.ppid() == worker.pid
            killed.kill()
            return True

    wait_for(kill)
    noted, attempts = len(here.events(job_id, "epoch")), here.job(job_id).attempt
    done = ended(api, location)
    assert done["state"] == "succeeded", done["reason"]
    assert done["attempt"] > attempts
    assert [epoch["epoch"] for epoch in done["epochs"]] == list(range(epochs + 1))
    assert worker.is_running()
    # The next attempt learned only what those before it had not.
    happened = here.events(job_id, "state", "epoch")
    begun = [i for i, event in enumerate(happened) if event.data.get("state") == "running"]
    again = [event.data["epoch"] for event in happened[begun[attempts] :] if event.type == "epoch"]
    assert again == list(range(noted, epochs + 1))
    assert len(again) < epochs
    with opened(tmp_path, routing_store) as undisturbed:
        from service.worker.runner import run_job

        cohort = undisturbed.cohort(outside_scans(1))
        undisturbed.adaptation(cohort, job_id=job_id, options=here.job(job_id).options)
        run_job(job_id, undisturbed.settings)
        assert undisturbed.job(job_id).candidate_digest == done["candidate"]["digest"]
    versions = [v.artefact for v in api.store.versions.of("organ.at-dune")]
    assert [v.manifest.lineage.run for v in versions].count(job_id) == 1


def test_scan_is_answered_at_once_as_a_job_would(
    api: Any, worker: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scan,) = outside_scans(1).values()
    fields = {"model": "organ", "personalization": "scan"}
    jobs = api.client.get("/jobs").json()
    answer = api.segment(scan, **fields)
    assert answer.status_code == 200
    assert answer.headers["Locum-Personalization"] == "scan"
    assert answer.headers["Locum-Model"] == "organ@1"
    assert api.client.get("/jobs").json() == jobs
    receipt = api.segment(scan, **fields, output="json").json()["receipt"]
    assert "for this scan alone" in receipt["why"]
    # A scan that is too large for one run goes to a worker, and gets the same mask.
    monkeypatch.setattr(scan_requests, "MOST_PIXELS", 0)
    by_job = api.client.post(
        "/segment", files={"scan": ("scan", scan)}, data=fields, headers={"Prefer": "wait=60"}
    )
    assert by_job.headers["Preference-Applied"] == "wait=60"
    first, second = (
        np.asarray(nib.Nifti1Image.from_bytes(gzip.decompress(each.content)).dataobj)
        for each in (answer, by_job)
    )
    assert (first != second).mean() < 1e-3
    assert first.any()


def test_scan_job_returns_its_mask_to_a_waiting_client(api: Any, worker: psutil.Process) -> None:
    (scan,) = outside_scans(1).values()
    before = api.store.versions.names()
    answer = api.client.post(
        "/segment",
        files={"scan": ("scan", scan)},
        data={"model": "organ", "personalization": "scan", "preset": "ladder"},
        headers={"Prefer": "wait=60"},
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["Preference-Applied"] == "wait=60"
    assert answer.headers["Locum-Personalization"] == "scan"
    assert answer.headers["Content-Type"] == "application/gzip"
    assert api.store.versions.names() == before
