"""Latency of GET /health/live while every core adapts, and the work left after the jobs are cancelled.

The service as started by its command, and a second worker, so that two adaptation jobs run at once.
`GET /health/live` is requested repeatedly on one kept connection: first with the service at rest, then with
both jobs adapting. Both jobs are then cancelled, and the remaining work is measured: the time until the jobs
are over, and the processor time that API and workers use in the five seconds after.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import psutil

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.cost.serving import SIZE, TASK, scan_bytes
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.gpu import device_of
from benchmarks.harness.measuring import processor_seconds
from benchmarks.harness.random_space import publish_random_space
from benchmarks.harness.tables import table
from locum.demo.service_process import running_service
from model_store.store import Store
from service.runtime.embedded_worker import worker_command

NAME = "load"
HOSPITAL = "outside"
SCANS = 8
# Learns until it is cancelled. The default learns nothing.
LEARNS = {"preset": "paper", "epochs": 200, "batch_size": 8}
# Between two requests: without a pause the probe itself would be the load.
PAUSE_S = 0.01
_PATIENCE_S = 120.0
_AFTER_S = 5.0


@dataclass(frozen=True)
class Profile:
    """How long to ask at rest and under load, the adapted U-Nets' width, and a free port."""

    seconds: float = 30.0
    width: int = 16
    port: int = 8799
    device: str = "cpu"


PROFILES = {"smoke": Profile(2.0, 2), "cpu": Profile(), "gpu": Profile(width=32, device="cuda")}


class HealthUnderLoad(CostExperiment[Profile]):
    """Latency of /health/live while two jobs adapt."""

    name = "health_under_load"
    title = "Health under load"
    question = "Does the service answer while jobs adapt?"
    profiles = PROFILES

    def kinds(self) -> Mapping[str, Kind]:
        """One kind."""
        return {"": Kind(compute, _section)}

    def measured(self) -> Sequence[Cell]:
        """One cell."""
        settings = self.profile
        shared = {"seconds": settings.seconds, "width": settings.width, "port": settings.port}
        return [{"jobs": 2, "preset": LEARNS["preset"], **shared}]


@contextmanager
def second_worker(store: Path, state: Path) -> Iterator[None]:
    """Start another worker on the service's queue; stop it at the end."""
    environment = os.environ | {
        "LOCUM_STORE": str(store.absolute()),
        "LOCUM_STATE_DIR": str(state.absolute()),
    }
    with (state / "second.log").open("wb") as log:
        process = subprocess.Popen(worker_command(), env=environment, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def ask(port: int, seconds: float) -> list[float]:
    """Seconds of each request, sent one after the other for `seconds`."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    taken = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        connection.request("GET", "/health/live")
        answer = connection.getresponse()
        answer.read()
        taken.append(time.perf_counter() - began)
        if answer.status != httpx.codes.OK:
            raise RuntimeError(f"/health/live answered {answer.status}")
        time.sleep(PAUSE_S)
    connection.close()
    return taken


def start_job(client: httpx.Client, **options: Any) -> str:
    """Start an adaptation. Returns the job's id."""
    answer = client.post(
        f"/hospitals/{HOSPITAL}/adaptations",
        files=[("scans", (f"{number}.png", scan_bytes("png"))) for number in range(SCANS)],
        data={"options": json.dumps(options)},
    )
    answer.raise_for_status()
    return str(answer.json()["id"])


def wait_for(client: httpx.Client, jobs: list[str], *states: str, adapting: bool = False) -> float:
    """Seconds until every job was in one of the states, and with `adapting` past its first epoch.

    Asks for one job at a time, a few times a second: more questions would slow the jobs down.
    """
    began, left = time.perf_counter(), list(jobs)
    while time.perf_counter() - began < _PATIENCE_S:
        job = client.get(f"/jobs/{left[0]}").json()
        if job["state"] in states and (job["epochs"] or not adapting):
            left.pop(0)
            if not left:
                return time.perf_counter() - began
        else:
            time.sleep(0.2)
    raise RuntimeError(f"job {left[0]} is {job['state']}, expected {states}: {job}")


def compute(cell: Cell, work: Path) -> dict[str, Any]:
    """Latencies at rest and under load, and the work after cancelling."""
    store, state = work / f"store-{os.getpid()}", work / f"state-{os.getpid()}"
    publish_random_space(Store(store), NAME, TASK, cell["width"], run="health")
    os.environ |= {"LOCUM_THREADS": "1", "LOCUM_DEVICE": device_of(cell)}
    with ExitStack() as stack:
        client = stack.enter_context(running_service(store, state, cell["port"]))
        stack.enter_context(second_worker(store, state))
        client.put(f"/hospitals/{HOSPITAL}", json={"name": "Outside"}).raise_for_status()
        rest = ask(cell["port"], cell["seconds"])
        jobs = [start_job(client, **LEARNS) for _ in range(cell["jobs"])]
        wait_for(client, jobs, "running", adapting=True)
        load = ask(cell["port"], cell["seconds"])
        wait_for(client, jobs, "running")
        before = _processor_seconds()
        for job in jobs:
            client.delete(f"/jobs/{job}").raise_for_status()
        cancelled = wait_for(client, jobs, "cancelled")
        busy = _processor_seconds() - before
        before = _processor_seconds()
        time.sleep(_AFTER_S)
        return {
            "rest_s": _summary(rest),
            "load_s": _summary(load),
            "cancelled_after_s": round(cancelled, 3),
            "processor_s_until_cancelled": round(busy, 3),
            "processor_s_in_the_5_s_after": round(_processor_seconds() - before, 3),
        }


def _processor_seconds() -> float:
    """Processor seconds of all child processes: API and workers."""
    return processor_seconds(psutil.Process().children(recursive=True))


def _summary(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(median(seconds), 5),
        "p99": round(quantiles(seconds, n=100)[98], 5),
        "largest": round(max(seconds), 5),
        "count": len(seconds),
    }


def _section(rows: Sequence[Row]) -> list[str]:
    lines = [
        [label, *(f"{1e3 * r['result'][side][name]:.1f}" for name in ("median", "p99", "largest")), count]
        for r in rows
        for label, side in (("at rest", "rest_s"), ("two jobs adapting", "load_s"))
        for count in [str(r["result"][side]["count"])]
    ]
    cores = rows[0]["made_with"]["machine"].rpartition(", ")[2]
    return [
        "Milliseconds that `GET /health/live` takes over loopback, and two adaptations of U-Nets of "
        f"width {rows[0]['cell']['width']} on {SCANS} images of {SIZE}x{SIZE} by two workers of one thread "
        f"each, on a machine of {cores}.",
        table(["", "median", "99th percentile", "largest", "questions"], lines),
        *(
            f"Cancelled: both jobs were over {r['result']['cancelled_after_s']:.1f} s after the first of "
            "the two requests; in the five seconds after that, API and workers together took "
            f"{r['result']['processor_s_in_the_5_s_after']:.2f} s of processor time."
            for r in rows
        ),
    ]
