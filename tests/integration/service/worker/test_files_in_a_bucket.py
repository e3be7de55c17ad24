"""An API and a worker that share a database and a bucket, and no disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer

from service.cohorts import cohorts
from service.database.job_states import TERMINAL
from service.jobs import records
from service.settings import Settings
from service.worker.runner import run_job
from tests.helpers.service.routing_federation import outside_scans
from tests.helpers.service.workplace import Workplace, opened
from tests.integration.service.conftest import Api


class Server:
    """An S3 server that goes and comes back; moto keeps the objects meanwhile."""

    def __init__(self) -> None:
        self._port, self._server = 0, None
        self.start()

    def start(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()
        host, self._port = self._server.get_host_and_port()
        self.url = f"http://{host}:{self._port}"

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = None


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        found = Server()
        patch.setenv("AWS_ENDPOINT_URL", found.url)
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setattr("model_store.bucket._RETRIES", 0)
        with urlopen(Request(f"{found.url}/hospital-files", method="PUT"), timeout=10):
            pass
        yield found
        found.stop()


@pytest.fixture(scope="module")
def place(
    server: Server, tmp_path_factory: pytest.TempPathFactory, routing_store: Path
) -> Iterator[Workplace]:
    with opened(tmp_path_factory.mktemp("bucket"), routing_store, files="s3://hospital-files/a") as found:
        yield found


@pytest.fixture(scope="module")
def api(place: Workplace, start: Callable[..., Api]) -> Api:
    """With a state folder of its own."""
    return start(
        place.settings.store, database_url=place.settings.resolved_database_url, files=place.settings.files
    )


@pytest.fixture(scope="module")
def worker(place: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """With a state folder of its own."""
    return Settings(
        store=place.settings.store,
        state_dir=tmp_path_factory.mktemp("worker"),
        database_url=place.settings.resolved_database_url,
        files=place.settings.files,
        device="cpu",
        threads=1,
    )


@pytest.fixture(scope="module")
def scans() -> dict[str, bytes]:
    return dict(outside_scans(2))


def upload(api: Api, scans: dict[str, bytes]) -> str:
    cohort = api.client.post("/hospitals/dune/cohorts").headers["location"]
    for name, data in scans.items():
        assert api.client.put(f"{cohort}/scans/{name}", content=data).status_code == 201
    return cohort


def test_adaptation_runs_without_a_shared_disk_and_leaves_nothing_behind(
    api: Api, worker: Settings, place: Workplace, scans: dict[str, bytes]
) -> None:
    cohort = upload(api, scans)
    asked = {
        "model": "organ",
        "options": {"preset": "paper", "epochs": 1},
        "cohort": cohort.rpartition("/")[2],
    }
    job = api.client.post("/hospitals/dune/adaptations", json=asked).json()["id"]
    run_job(job, worker)
    found = api.client.get(f"/jobs/{job}").json()
    assert found["state"] in TERMINAL - {"failed", "cancelled"}, found
    assert api.client.get(f"/jobs/{job}/card").text.count("data:image/png;base64,") >= 2
    for root in (api.settings.state_dir, worker.state_dir):
        assert not any((root / name).exists() for name in ("cohorts", "jobs"))
    files = api.settings.open_files()
    assert "checkpoint" not in files.names(f"jobs/{job}")
    assert len(files.names("cohorts")) == len(scans)
    assert api.client.delete(f"/jobs/{job}/files").status_code == 204
    assert api.client.delete(cohort).status_code == 204
    assert (files.names("cohorts"), files.names("jobs")) == ([], [])


def test_scan_job_and_its_answer_travel_through_the_bucket(
    api: Api, worker: Settings, scans: dict[str, bytes]
) -> None:
    (scan, *_) = scans.values()
    asked = {"model": "organ", "personalization": "scan", "preset": "paper"}
    answer = api.client.post(
        "/segment", files={"scan": scan}, data=asked, headers={"Prefer": "respond-async"}
    )
    assert answer.status_code == 202, answer.text
    job = answer.json()["id"]
    run_job(job, worker)
    result = api.client.get(f"/jobs/{job}/result")
    assert result.status_code == 200, result.text
    assert api.settings.open_files().names(f"jobs/{job}") == ["result", "result.json"]


def test_storage_that_is_down_is_said_so_and_costs_a_job_no_attempt(
    api: Api, worker: Settings, place: Workplace, server: Server, scans: dict[str, bytes]
) -> None:
    cohort = upload(api, scans)
    job = place.adaptation(cohort.rpartition("/")[2], options={"epochs": 1})
    other = upload(api, {})
    server.stop()
    (scan, *_) = scans.values()
    for answer in (
        api.client.put(f"{other}/scans/a.nii.gz", content=scan),
        api.client.post(
            "/segment",
            files={"scan": scan},
            data={"model": "organ", "personalization": "scan", "preset": "paper"},
        ),
    ):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5"), answer.text
        assert answer.json()["type"] == "urn:locum:problem:files-unavailable"
    for _ in range(worker.max_attempts + 1):
        run_job(job, worker)
        assert (place.job(job).state, place.job(job).attempt) == ("queued", 0)
        assert place.job(job).progress["why"] == "the files or the model store cannot be reached"
        with place.database.write() as session:
            records.get(session, job).retry_at = None
    server.start()
    run_job(job, worker)
    assert place.job(job).state in TERMINAL - {"failed", "cancelled"}
    assert place.job(job).attempt == 1
    with place.database.read() as session:
        assert [scan.name for scan in cohorts.scans(session, cohort.rpartition("/")[2])] == sorted(scans)
