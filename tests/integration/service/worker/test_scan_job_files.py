"""The files of jobs on one scan: bounded while they wait, and none is kept once the answer was given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

import httpx
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from model_store.artefact import Artefact
from service.database import Job
from service.database.job_states import JobEnd
from service.jobs import leases, records
from service.jobs.files import JobFolder, StoredResult
from tests.helpers.service.adapted_store import publish_space
from tests.helpers.waiting import wait_for

# Far longer than anything here takes, unless it hangs.
LONG = "50"
TILTED = np.eye(4)
TILTED[:3, :3] = Rotation.from_euler("x", 30, degrees=True).as_matrix()


@pytest.fixture(scope="module")
def scan(make_png: Callable[..., bytes], picture: Any) -> bytes:
    return make_png(picture)


@pytest.fixture(scope="module")
def api(
    start: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
    publish_bright: Callable[..., Artefact],
    scan: bytes,
) -> Any:
    """With room for two scans; there is no Redis."""
    root = tmp_path_factory.mktemp("store")
    publish_space(root, publish_bright)
    return start(root, cohort_quota_bytes=2 * len(scan))


def ask(api: Any, scan: bytes, hospital: str | None = None, **headers: str) -> httpx.Response:
    answer: httpx.Response = api.client.post(
        "/segment",
        files={"scan": ("scan", scan)},
        data={
            "model": "bright",
            "personalization": "scan",
            **({} if hospital is None else {"hospital": hospital}),
        },
        headers=headers,
    )
    return answer


def queued(api: Any) -> list[Job]:
    with api.context.database.read() as session:
        return records.listed(session, state="queued")


@contextmanager
def worked_on(api: Any, state: JobEnd) -> Iterator[None]:
    """A worker ends the next job so, as soon as it comes."""

    def work() -> None:
        (job,) = wait_for(lambda: queued(api))
        lease = leases.claim(api.context.database, job.id, "test", api.settings)
        assert lease is not None
        JobFolder(api.settings.open_files(), job.id).write_result(StoredResult(b"a mask", "image/png", {}))
        leases.finish(api.context.database, lease, state, reason="because")

    worker = threading.Thread(target=work)
    worker.start()
    yield
    worker.join()


@pytest.mark.parametrize(("state", "status"), [("succeeded", 200), ("failed", 409)])
def test_waited_scan_job_leaves_no_files(api: Any, scan: bytes, state: JobEnd, status: int) -> None:
    with worked_on(api, state):
        answer = ask(api, scan, Prefer=f"wait={LONG}")
    assert answer.status_code == status
    with api.context.database.read() as session:
        job = records.listed(session)[0]
    # The reconciler deletes what comes late.
    assert job.expires_at <= datetime.now(UTC)
    assert not JobFolder(api.settings.open_files(), job.id).names


def test_scan_too_large_to_restore_is_413_and_not_queued(
    api: Any, make_nifti: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("model_store.preprocessing.restore"), "MOST_ELEMENTS", 10_000)
    refused = ask(api, make_nifti(np.zeros((40, 40, 8), np.uint8), TILTED))
    assert (refused.status_code, refused.json()["type"]) == (413, "urn:locum:problem:scan-too-large")
    assert "the volume is tilted by 30 degrees" in refused.json()["detail"]
    assert queued(api) == []


def test_waiting_scans_above_the_cohort_quota_are_507(
    api: Any, scan: bytes, make_png: Callable[..., bytes]
) -> None:
    accepted = [ask(api, scan) for _ in range(2)]
    assert [answer.status_code for answer in accepted] == [202, 202]
    refused = ask(api, scan)
    assert (refused.status_code, refused.json()["type"]) == (507, "urn:locum:problem:no-room")
    assert f"have {2 * len(scan)} bytes" in refused.json()["detail"]
    assert "lists fewer" in refused.json()["detail"]
    larger = make_png(np.random.default_rng(0).integers(0, 256, (96, 96), np.uint8))
    assert (
        f"expected at most {2 * len(scan)}, the limit of the scans of yours"
        in ask(api, larger).json()["detail"]
    )
    kept = {job.id for job in queued(api)}
    assert {folder.name for folder in (api.settings.state_dir / "jobs").iterdir()} == kept
    api.client.delete(accepted[0].headers["location"])
    assert ask(api, scan).status_code == 202


def test_one_hospital_of_several_has_half_of_the_quota_of_waiting_scans(
    api: Any, scan: bytes, start: Callable[..., Any]
) -> None:
    shared = start(api.settings.store, cohort_quota_bytes=2 * len(scan))
    for hospital in ("north", "south", "west"):
        shared.client.put(f"/hospitals/{hospital}", json={"name": hospital}).raise_for_status()
    assert ask(shared, scan, "north").status_code == 202
    refused = ask(shared, scan, "north")
    assert (refused.status_code, refused.json()["type"]) == (507, "urn:locum:problem:no-room")
    assert f"'north' that wait for a worker have {len(scan)} bytes" in refused.json()["detail"]
    assert f"exceed their limit of {len(scan)} " in refused.json()["detail"]
    assert ask(shared, scan, "south").status_code == 202
    # Without what others have.
    full = ask(shared, scan, "west").json()["detail"]
    assert full.startswith(
        f"The scans that wait for a worker may have {2 * len(scan)} bytes (LOCUM_COHORT_QUOTA_BYTES), "
        f"expected {len(scan)} of them free, found fewer"
    )
