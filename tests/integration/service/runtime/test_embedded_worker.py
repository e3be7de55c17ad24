"""`python -m service` and `celery -A service.worker worker`, as real processes that are really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.harness.forked import Forked
from model_store.artefact import Artefact
from model_store.manifest import GRAPH
from service.database import Database, upgrade
from service.runtime.broker import Broker
from service.runtime.queue import VERIFY_STORE, Queue
from service.runtime.store_check import StoreVerdict, latest_verdict
from service.settings import Settings
from tests.helpers.service.queued import queued
from tests.helpers.waiting import wait_for

PATIENCE_SECONDS = 60


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running_in(state: Path) -> set[int]:
    """Processes that name this state folder in their environment or command line."""
    found = set()
    for process in psutil.process_iter():
        try:
            named = str(state) in " ".join([*process.cmdline(), *process.environ().values()])
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
        if named and process.pid != os.getpid() and running(process.pid):
            found.add(process.pid)
    return found


@contextmanager
def served(store: Path, state: Path, *arguments: str) -> Iterator[tuple[Forked, httpx.Client]]:
    """`python -m service` on a free port, killed at the end if it still runs."""
    environment = os.environ | {"LOCUM_STATE_DIR": str(state), "LOCUM_LOG_FORMAT": "plain"}
    environment.pop("LOCUM_REDIS_URL", None)
    log = state.with_suffix(".log")
    log.write_text("")
    process = Forked("service", ["--store", store, "--port", 0, *arguments], log, environment)
    try:
        url = wait_for(lambda: _url(log), psutil.Process(process.pid))
        with httpx.Client(base_url=url, timeout=30) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()
        wait_for(lambda: not running_in(state))


def _url(log: Path) -> str | None:
    for line in log.read_text().splitlines():
        if "Uvicorn running on" in line:
            return line.split("running on ")[1].split()[0]
    return None


def verdict_in(state: Path) -> StoreVerdict | None:
    database = Database(f"sqlite:///{state / 'locum.db'}")
    try:
        return latest_verdict(database)
    finally:
        database.dispose()


def workers_of(process: Forked) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children():
        try:
            if "service.worker" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def store(tmp_path: Path, publish_bright: Callable[..., Artefact]) -> Path:
    root = tmp_path / "store"
    publish_bright(root)
    return root


def test_service_command_serves_replaces_its_worker_and_ends_on_sigterm(
    store: Path, tmp_path: Path, make_png: Any, picture: Any, publish_bright: Callable[..., Artefact]
) -> None:
    damaged = publish_bright(store, at=80).path / GRAPH
    damaged.chmod(0o644)
    damaged.write_bytes(b"not what was published")
    state = tmp_path / "state"
    with served(store, state) as (process, client):
        assert client.base_url.host == "127.0.0.1"
        wait_for(lambda: client.get("/health/ready").json()["status"] == "ready", psutil.Process(process.pid))
        mask = client.post("/segment", files={"scan": ("s", make_png(picture))}, data={"model": "bright@1"})
        assert mask.status_code == 200
        # The embedded worker has hashed the store without being asked, and the API shows what it found.
        wait_for(
            lambda: "locum_store_damaged_artefacts 1.0" in client.get("/metrics").text,
            psutil.Process(process.pid),
        )
        verdict = verdict_in(state)
        assert verdict is not None
        assert list(verdict.damaged) == ["bright@2"]
        # A worker that is killed is replaced.
        (worker,) = wait_for(lambda: workers_of(process))
        worker.kill()
        (replaced,) = wait_for(
            lambda: [w for w in workers_of(process) if w.pid != worker.pid], psutil.Process(process.pid)
        )
        assert replaced.is_running()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
        wait_for(lambda: not running_in(state))
    assert "Traceback" not in state.with_suffix(".log").read_text()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_child_process_outlives_the_service(store: Path, tmp_path: Path, ending: signal.Signals) -> None:
    state = tmp_path / "state"
    with served(store, state) as (process, _):
        wait_for(lambda: workers_of(process), psutil.Process(process.pid))
        assert len(running_in(state)) >= 3
        process.send_signal(ending)
        code = process.wait(PATIENCE_SECONDS)
        assert code == (0 if ending == signal.SIGINT else -signal.SIGKILL)
        wait_for(lambda: not running_in(state))
    assert "Traceback" not in state.with_suffix(".log").read_text()


def test_service_restarts_with_its_state_after_sigkill(store: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    serving = "/hospitals/north/serving/bright"
    with served(store, state, "--no-worker") as (process, client):
        client.put("/hospitals/north", json={"name": "North"})
        body = {"version": 1, "actor": "ada", "reason": "why"}
        assert client.put(serving, json=body, headers={"If-Match": '"0"'}).status_code == 200
        process.kill()
        process.wait()
    with served(store, state, "--no-worker") as (_, client):
        assert client.get(serving).headers["etag"] == '"2"'
        ready = client.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")


def test_standalone_worker_takes_queued_messages_after_a_kill(store: Path, tmp_path: Path) -> None:
    """Broker, queue and worker without the API; the worker is killed in between, and nothing is lost."""
    state = tmp_path / "state"
    settings = Settings(state_dir=state, store=store, redis_url=None)
    broker = Broker(settings)
    broker.start()
    database = Database(settings.resolved_database_url)
    upgrade(database)
    database.dispose()
    queue = Queue(settings, broker)
    asked = datetime.now(UTC)
    queue.send(VERIFY_STORE)
    environment = os.environ | {"LOCUM_STATE_DIR": str(state), "LOCUM_STORE": str(store)}
    environment.pop("LOCUM_REDIS_URL", None)
    command = [sys.executable, "-m", "celery", "--quiet", "-A", "service.worker", "worker"]
    worker = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        verdict = wait_for(lambda: _verdict_since(state, asked), psutil.Process(worker.pid))
        assert (verdict.versions, verdict.damaged) == (1, {})
    finally:
        family = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
        worker.wait()
        # While the process of its tasks lives, Redis sees a worker that waits, and may hand it the message.
        psutil.wait_procs(family, timeout=PATIENCE_SECONDS)
    asked = datetime.now(UTC)
    queue.send(VERIFY_STORE)
    worker = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: _verdict_since(state, asked), psutil.Process(worker.pid))
    finally:
        worker.terminate()
        worker.wait()
        queue.close()
        broker.stop()
    wait_for(lambda: not running_in(state))


def _verdict_since(state: Path, instant: datetime) -> StoreVerdict | None:
    verdict = verdict_in(state)
    return verdict if verdict is not None and verdict.finished_at >= instant else None


def test_open_event_stream_does_not_delay_shutdown(tmp_path: Path) -> None:
    with served(tmp_path / "store", tmp_path / "state", "--no-worker") as (process, client):
        database = Database(f"sqlite:///{tmp_path / 'state' / 'locum.db'}")
        with database.write() as session:
            asked = {"kind": "scan", "hospital": None, "model": "brain", "parent": "sha256:0"}
            job = queued(session, Settings(), **asked)
        database.dispose()
        with client.stream("GET", f"/jobs/{job.id}/events") as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: state"
            process.terminate()
            # Cut off, it would raise: the stream ends as it should, though the job still waits.
            assert [line for line in lines if line.startswith("event")] == []
        assert process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.process
def test_worker_that_is_stopped_before_it_is_ready_stops_its_redis(tmp_path: Path) -> None:
    code = """
from celery.signals import worker_init, worker_shutdown
from service.worker import celery
worker_init.send(sender=None)
child = celery.broker._child
assert child.alive
worker_shutdown.send(sender=None)
assert not child.alive
"""
    environment = os.environ | {"LOCUM_STATE_DIR": str(tmp_path / "state")}
    environment.pop("LOCUM_REDIS_URL", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
