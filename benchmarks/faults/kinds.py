"""The kinds of faults, each injected for real into a running service.

A kind is a function that harms a `Scene` and returns the processes it killed. Recovery is up to the service.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import numpy as np
import psutil
import redis
from PIL import Image

from benchmarks.faults.service import HOSPITAL, Held, Service
from benchmarks.faults.space import scan_bytes
from service.errors import BrokerError
from service.runtime.queue import RUN_JOB, Queue

Pids = list[int]

STAGES = ("preparing", "adapting", "judging", "drawing", "publishing")
# Instants within a job's last stage: its version is being written; it is visible, but not yet recorded.
STAGED, VISIBLE = "staged", "visible"
INSTANTS = (*STAGES, STAGED, VISIBLE)


@dataclass(frozen=True)
class Scene:
    """The target of a fault: `held` is the job aimed at, None when no worker had one."""

    service: Service
    held: Held | None
    chance: Random


FaultKind = Callable[[Scene], Pids]


def kill(*pids: int | None) -> Pids:
    """Send SIGKILL to all of them at once. A process that has already ended is no error."""
    known = [pid for pid in pids if pid is not None]
    signal_all(known, signal.SIGKILL)
    return known


def task_killed(scene: Scene) -> Pids:
    """kill -9 of the process that works on the job, as the out-of-memory killer does."""
    return kill(scene.held.pid if scene.held else None)


def worker_killed(scene: Scene) -> Pids:
    """kill -9 of a worker's main process. Linux kills its task process too; elsewhere that one continues."""
    main = _main_of(scene)
    children = _children(main)
    killed = kill(main)
    end = time.monotonic() + 1
    while time.monotonic() < end and any(map(lives, children)):
        time.sleep(0.01)
    return killed + [pid for pid in children if not lives(pid)]


def worker_stopped(scene: Scene) -> Pids:
    """SIGSTOP of a whole worker for one to two leases, then SIGCONT: the worker does not notice the gap."""
    main = _main_of(scene)
    stopped = [pid for pid in (main, *_children(main)) if pid is not None]
    signal_all(stopped, signal.SIGSTOP)
    scene.service.pause(scene.service.settings.lease_seconds * scene.chance.uniform(1.0, 2.0))
    signal_all(stopped, signal.SIGCONT)
    return []


def api_killed(scene: Scene) -> Pids:
    """kill -9 of the API; its Redis ends with it, unless a worker had to start one."""
    api = scene.service.api
    assert api is not None
    killed = kill(api.pid)
    api.wait()
    return killed


def api_killed_in_upload(scene: Scene) -> Pids:
    """kill -9 of the API when half a scan has arrived. The client sends it again; it must be stored once."""
    service, chance = scene.service, scene.chance
    cohort, data = service.upload(0), scan_bytes(chance.randrange(1000))
    path = f"/hospitals/{HOSPITAL}/cohorts/{cohort}/scans/a"
    sent = chance.randrange(1, len(data))
    with socket.create_connection(("127.0.0.1", service.settings.port)) as connection:
        head = f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data[:sent])
        time.sleep(chance.uniform(0, 0.05))
        killed = api_killed(scene)
    service.expect(
        service.ask("GET", path.removesuffix("/a")).json()["scans"] == [], "half a scan is in a cohort"
    )
    service.expect(service.put_scan(cohort, "a", data).status_code == 201, "a scan cannot be sent again")
    return killed


def redis_killed(scene: Scene) -> Pids:
    """kill -9 of Redis."""
    return kill(scene.service.redis_pid())


def redis_restarted(scene: Scene) -> Pids:
    """SIGTERM to Redis, which saves and ends; the service must start it again."""
    pid = scene.service.redis_pid()
    if pid is None:
        return []
    signal_all([pid], signal.SIGTERM)
    return [pid]


def redis_flushed(scene: Scene) -> Pids:
    """FLUSHALL: every message is lost."""
    with suppress(redis.RedisError):
        scene.service.broker.client.flushall()
    return []


def message_doubled(scene: Scene) -> Pids:
    """A new job with its message sent four times: workers race for it."""
    send(scene.service, scene.service.submit(epochs=2), times=3)
    return []


def quota_filled(scene: Scene) -> Pids:
    """Upload scans until the quota is full; after one cohort is deleted, uploads must succeed again."""
    service = scene.service
    cohort = service.upload(0)
    noise = np.random.default_rng(scene.chance.randrange(2**32))
    for number in range(1 + service.settings.cohort_quota_bytes // 60_000):
        answer = service.put_scan(cohort, str(number), _noise_png(noise))
        if answer.status_code != 201:
            break
    service.expect(answer.status_code == 507, f"a full quota was answered with {answer.status_code}")
    service.ask("DELETE", f"/hospitals/{HOSPITAL}/cohorts/{cohort}")
    another = service.upload(0)
    after = service.put_scan(another, "a", _noise_png(noise))
    service.expect(after.status_code == 201, f"room was made, and a scan answered with {after.status_code}")
    service.ask("DELETE", f"/hospitals/{HOSPITAL}/cohorts/{another}")
    return []


def job_cancelled(scene: Scene) -> Pids:
    """DELETE of a running job: not a fault, but it may coincide with one."""
    if scene.held is not None:
        scene.service.ask("DELETE", f"/jobs/{scene.held.job}")
    return []


KINDS: dict[str, tuple[FaultKind, int]] = {
    "task killed": (task_killed, 6),
    "worker killed": (worker_killed, 5),
    "worker stopped": (worker_stopped, 4),
    "API killed": (api_killed, 2),
    "API killed in an upload": (api_killed_in_upload, 2),
    "Redis killed": (redis_killed, 2),
    "Redis restarted": (redis_restarted, 1),
    "Redis flushed": (redis_flushed, 3),
    "message doubled": (message_doubled, 2),
    "quota filled": (quota_filled, 1),
    "job cancelled": (job_cancelled, 1),
}
"""Each kind with its weight in the draw."""


def send(service: Service, job: str, times: int = 1) -> None:
    """Send duplicate messages of a job."""
    queue = Queue(service.settings, service.broker)
    try:
        for _ in range(times):
            with suppress(BrokerError):
                queue.send(RUN_JOB, job)
    finally:
        queue.close()


def lives(pid: int) -> bool:
    """Whether the process runs. A zombie or stopped process does not, though its pid still exists."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _main_of(scene: Scene) -> int | None:
    """The pid of the worker that has the job, else of any worker."""
    mains = [worker.pid for worker in scene.service.workers]
    if scene.held is not None:
        with suppress(psutil.NoSuchProcess):
            parent: int = psutil.Process(scene.held.pid).ppid()
            if parent in mains:
                return parent
    return scene.chance.choice(mains) if mains else None


def _children(pid: int | None) -> Pids:
    if pid is None:
        return []
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def signal_all(pids: Pids, number: signal.Signals) -> None:
    """Send a signal to every process that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _noise_png(generator: np.random.Generator) -> bytes:
    """A PNG of 65 kB that does not compress."""
    stream = io.BytesIO()
    Image.fromarray(generator.integers(0, 256, (256, 256), np.uint8)).save(stream, "PNG")
    return stream.getvalue()
