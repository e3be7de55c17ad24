"""What costs no job an attempt: Redis goes, or the API, or room on the disk; workers race."""

from __future__ import annotations

import socket

import httpx
import pytest

from benchmarks.faults import kinds
from benchmarks.faults.kinds import Scene
from benchmarks.faults.service import HOSPITAL
from benchmarks.faults.space import scan_bytes

# Long enough for busy cores: here a lease that runs out is none of the faults.
LEASE_SECONDS = 10


def test_no_job_is_lost_with_redis(scene: Scene) -> None:
    """Two run and others wait each time that Redis is flushed, killed, or restarted."""
    service = scene.service
    jobs: list[str] = []

    def busy() -> bool:
        if sum(not service.over(job) for job in jobs) < 3:
            jobs.append(service.submit())
        return len(service.held()) == 2 and service.redis_pid() is not None

    for harm in (kinds.redis_flushed, kinds.redis_killed, kinds.redis_restarted):
        service.until(busy)
        harm(scene)
        # Accepted at once, with a Redis or without.
        jobs.append(service.submit())
    service.until(lambda: service.over(*jobs))
    assert {service.job(job).state for job in jobs} == {"succeeded"}
    assert {service.job(job).attempt for job in jobs} == {1}


def test_a_job_goes_on_without_the_api(scene: Scene) -> None:
    service = scene.service
    job, waiting = service.submit(epochs=20), service.submit()
    service.until(lambda: service.held("adapting"))
    kinds.api_killed(scene)
    with pytest.raises(httpx.TransportError):
        service.client.get("/health/live")
    service.until(lambda: service.over(job, waiting))
    assert service.job(job).attempt == 1
    assert service.ask("GET", f"/jobs/{job}").json()["state"] == "succeeded"


def test_half_an_upload_leaves_nothing(scene: Scene) -> None:
    """Neither half a scan in a cohort, nor a job over half of its scans."""
    service = scene.service
    kinds.api_killed_in_upload(scene)
    service.until(service.ready)
    before = service.ask("GET", "/jobs").json()["jobs"]
    part = b'--b\r\nContent-Disposition: form-data; name="scans"; filename="a"\r\n\r\n' + scan_bytes(1)
    with socket.create_connection(("127.0.0.1", service.settings.port)) as connection:
        head = (
            f"POST /hospitals/{HOSPITAL}/adaptations HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {2 * len(part)}\r\n\r\n"
        )
        connection.sendall(head.encode() + part)
        kinds.api_killed(scene)
    assert service.ask("GET", "/jobs").json()["jobs"] == before


def test_a_full_quota_refuses_scans_and_disturbs_no_job(scene: Scene) -> None:
    job = scene.service.submit(epochs=20)
    kinds.quota_filled(scene)
    scene.service.until(lambda: scene.service.over(job))
    assert (scene.service.job(job).state, scene.service.job(job).attempt) == ("succeeded", 1)


def test_workers_that_race_for_a_job_run_it_once(scene: Scene) -> None:
    service = scene.service
    job = service.submit()
    kinds.send(service, job, times=5)
    service.until(lambda: service.over(job))
    service.until(lambda: not service.broker.client.llen("locum:adaptation"))
    assert service.states(job) == ["queued", "running", "succeeded"]
