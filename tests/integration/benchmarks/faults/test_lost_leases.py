"""Workers that are lost with a job, killed at each of its stages or away for longer than their lease."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.faults.kinds import STAGES, FaultKind, Scene, kill, task_killed, worker_killed
from benchmarks.faults.service import Service
from tests.helpers import waiting

LEASE_SECONDS = 1
# Without looking after the service, and more often than that would be.
wait_for = partial(waiting.wait_for, pause_s=0.002)


@contextmanager
def database_held(service: Service) -> Iterator[None]:
    """Hold the database's write lock: no other process can write meanwhile."""
    with service.database.write() as session:
        # The transaction begins with its first use.
        session.connection()
        yield


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread stands: one that still runs would get what is let go next."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    # The state follows the command's name, which may hold anything but the last bracket.
    wait_for(
        lambda: all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in threads.glob("*/stat"))
    )


@pytest.mark.parametrize("killed", [task_killed, worker_killed])
def test_a_job_outlives_its_worker_at_every_stage(scene: Scene, killed: FaultKind) -> None:
    service = scene.service
    job, token, kills = service.submit(), 0, 0
    for stage in STAGES:
        held = service.held_in(stage, job, after=token)
        kills = kills + 1 if held.job == job else 1
        job, token = held.job, held.token
        assert held.pid in killed(replace(scene, held=held))
    service.until(lambda: service.over(job))
    found = service.job(job)
    assert found.state == "succeeded"
    # More, where cores are so busy that a lease runs out by itself.
    assert found.attempt > kills
    assert service.published().count(job) == 1


def test_a_version_that_was_written_by_half_is_not_seen_and_is_swept(service: Service) -> None:
    held = service.held_in("publishing")
    job = held.job
    staging = service.settings.store / ".staging"
    # This test holds the lock of the database, so the worker is not admitted and waits.
    with database_held(service):
        wait_for(lambda: any(staging.glob("*/manifest.sha256")))
        kill(held.pid)
        assert any(staging.iterdir())
        assert job not in service.published()
    service.until(lambda: service.over(job))
    assert service.job(job).state == "succeeded"
    assert list(staging.iterdir()) == []


def test_a_version_whose_job_was_not_told_of_it_is_adopted(service: Service) -> None:
    held = service.held_in("publishing")
    job = held.job
    wait_for(lambda: job in service.published(), pause_s=0)
    kill(held.pid)
    service.until(lambda: service.over(job))
    assert service.job(job).state == "succeeded"
    assert service.job(job).result is not None
    assert service.published().count(job) == 1


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_worker_that_comes_back_after_its_lease_publishes_nothing(
    service: Service, cancelled: bool
) -> None:
    held = service.held_in("publishing")
    job = held.job
    # While this test writes, the worker does not: stopped in a transaction, it would keep everybody else from
    # the database, as it would from the name if it were at its version already.
    with database_held(service):
        stop(held.pid)
        assert not any((service.settings.store / ".staging").iterdir())
    if cancelled:
        service.ask("DELETE", f"/jobs/{job}")
    service.until(lambda: service.over(job))
    ended = service.job(job)
    assert ended.state == ("cancelled" if cancelled else "succeeded")
    before, noted = service.published(), service.states(job)
    os.kill(held.pid, signal.SIGCONT)
    stops = f"job {job}: (its lease went to another worker|this worker holds token {held.token})"
    service.until(lambda: re.search(stops, (service.settings.state_dir / "processes.log").read_text()))
    service.pause(0.2)
    assert service.published() == before
    assert before.count(job) == (0 if cancelled else 1)
    assert service.states(job) == noted
    assert service.job(job).candidate_digest == ended.candidate_digest
