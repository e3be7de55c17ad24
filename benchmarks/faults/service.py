"""A service of real processes to be killed: an API with its Redis, and workers.

    publish_space(Store(store))
    with Service(store, state) as service:
        job = service.submit()
        os.kill(service.until(service.held)[0].pid, signal.SIGKILL)
        service.until(lambda: service.over(job))

Leases are short and the routing space is tiny, so that minutes have the events of hours. `tick` restarts dead
processes, as a process manager would.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import redis
from sqlalchemy import select

from benchmarks.faults.space import NAME, scan_bytes
from benchmarks.faults.workers import Start, Started, api_by_command, forked, left_of, session_of
from benchmarks.harness.campaign import NeverHappened
from locum.demo.service_process import free_port
from service.catalog.adapted import adapted_name
from service.database import Database, Job, upgrade
from service.database.job_states import HELD, TERMINAL
from service.identity import keys
from service.jobs import records
from service.runtime.broker import Broker
from service.runtime.embedded_worker import worker_environment
from service.settings import Settings

HOSPITAL = "outside"
_LOOK_S = 0.02

Value = TypeVar("Value")


@dataclass(frozen=True)
class Held:
    """A job that a worker has, with its stage, fencing token and the process that works on it."""

    job: str
    stage: str
    token: int
    pid: int


class Service:
    """The service runs inside `with`; at the end all of its processes are killed."""

    def __init__(
        self,
        store: Path | str,
        state: Path,
        *,
        workers: int = 2,
        other_apis: int = 0,
        start: Start = forked,
        start_api: Start = api_by_command,
        patience_s: float = 120.0,
        **settings: Any,
    ) -> None:
        """`start` starts a worker and `start_api` an API; `settings` override these defaults.

        Leases and intervals are short. `other_apis` run beside the one that is asked and killed, and
        reconcile at the same time.
        """
        chosen = {
            "lease_seconds": 2,
            "reconcile_every_seconds": 0.2,
            "resend_seconds": 1,
            "max_attempts": 50,
            "verify_every_seconds": 0,
            "threads": 1,
            "device": "cpu",
            "log_format": "plain",
        }
        self.settings = Settings(
            **{
                **chosen,
                **settings,
                "store": store,
                "state_dir": state,
                "embedded_worker": False,
                "port": free_port(),
            }
        )
        self._environment = os.environ | worker_environment(self.settings)
        self._environment.pop("LOCUM_REDIS_URL", None)
        self._count = workers
        self._others = [str(free_port()) for _ in range(other_apis)]
        self._other_apis: dict[str, Started] = {}
        self._start_worker, self._start_api = start, start_api
        self._patience_s = patience_s
        self._log = state / "processes.log"
        self.database = Database(self.settings.resolved_database_url)
        self.broker = Broker(self.settings)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.settings.port}", timeout=30)
        self.api: Started | None = None
        self.workers: list[Started] = []
        self._begun: list[Started] = []
        self.accepted: list[str] = []
        self.unexpected: list[str] = []
        self.cohort = ""

    def __enter__(self) -> Service:
        self.settings.make_state_dir()
        try:
            if self.settings.auth == "keys":
                self._authenticate()
            # The first process that is forked waits for the imports, without a bound.
            self.tick()
            self.until(self.ready)
            self.ask("PUT", f"/hospitals/{HOSPITAL}", json={"name": "Outside"})
            self.cohort = self.upload()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.broker.stop()
        self.database.dispose()
        while left := self.processes():
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=1)
        for child in self._begun:
            child.wait()

    def _authenticate(self) -> None:
        """Ask as an operator of all hospitals, who may register one."""
        upgrade(self.database)
        with self.database.write() as session:
            key = keys.create(session, "campaign", "admin", None)[1]
        self.client.headers["Authorization"] = f"Bearer {key}"

    # ------------------------------------------------------------------ processes

    def tick(self) -> None:
        """Restart dead processes: the API first, since every worker needs the Redis that is its child."""
        if self.api is None or self.api.poll() is not None:
            self.api = self._start_api(self._environment, self._log)
            self._begun.append(self.api)
        for port in self._others:
            if port not in self._other_apis or self._other_apis[port].poll() is not None:
                environment = {**self._environment, "LOCUM_PORT": port}
                self._other_apis[port] = self._start_api(environment, self._log)
                self._begun.append(self._other_apis[port])
        self.workers = [worker for worker in self.workers if worker.poll() is None]
        while len(self.workers) < self._count and self.ready():
            self.workers.append(self._start_worker(self._environment, self._log))
            self._begun.append(self.workers[-1])

    def ready(self) -> bool:
        """Whether the API reports that it is ready."""
        try:
            return self.client.get("/health/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def whole(self) -> bool:
        """Whether API and Redis answer and every worker runs, checked now."""
        return (
            all(worker.poll() is None for worker in self.workers)
            and len(self.workers) == self._count
            and self.redis_pid() is not None
            and self.ready()
        )

    def processes(self) -> list[psutil.Process]:
        """Every process of this service, orphans included."""
        return left_of(self._begun, self.settings.state_dir, self.broker.url.removeprefix("unix://"))

    def orphans(self) -> list[psutil.Process]:
        """Processes left by dead workers and APIs."""
        dead = {child.pid for child in self._begun if child.poll() is not None}
        return [process for process in self.processes() if session_of(process) in dead]

    def until(self, condition: Callable[[], Value], *, patience_s: float | None = None) -> Value:
        """Poll until the condition is true, calling `tick`; return its value. Raises NeverHappened."""
        end = time.monotonic() + (patience_s or self._patience_s)
        while not (value := condition()):
            if time.monotonic() > end:
                raise NeverHappened(f"not within {patience_s or self._patience_s:.0f} s; see {self._log}")
            self.tick()
            time.sleep(_LOOK_S)
        return value

    def pause(self, seconds: float) -> None:
        """Wait, calling `tick`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.tick()
            time.sleep(_LOOK_S)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Record a failed expectation; it is reported with the invariants."""
        if not holds:
            self.unexpected.append(otherwise)

    def redis_pid(self) -> int | None:
        """The pid of the Redis, None when it does not answer."""
        try:
            return int(self.broker.client.info("server")["process_id"])
        except redis.RedisError:
            return None

    # ------------------------------------------------------------------ asked over HTTP

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send an idempotent request, and retry it until the service answers."""

        def answer() -> httpx.Response | None:
            try:
                found = self.client.request(method, path, **request)
            except httpx.TransportError:
                return None
            if found.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
                self.unexpected.append(f"{method} {path} was answered with {found.text[:200]}")
                return None
            return None if found.status_code == httpx.codes.SERVICE_UNAVAILABLE else found

        found = self.until(answer)
        assert found is not None
        return found

    def upload(self, scans: int = 1) -> str:
        """Create a cohort with this many scans. Returns its id."""
        cohort = str(self.ask("POST", f"/hospitals/{HOSPITAL}/cohorts").json()["id"])
        for patient in range(scans):
            self.put_scan(cohort, f"{patient}.nii.gz", scan_bytes(patient)).raise_for_status()
        return cohort

    def put_scan(self, cohort: str, name: str, data: bytes) -> httpx.Response:
        """Upload a scan."""
        return self.ask("PUT", f"/hospitals/{HOSPITAL}/cohorts/{cohort}/scans/{name}", content=data)

    def submit(self, *, epochs: int = 1) -> str:
        """Submit an adaptation and return its job id. The idempotency key makes retries one job."""
        body = {"cohort": self.cohort, "model": NAME, "options": {"preset": "paper", "epochs": epochs}}
        key = {"Idempotency-Key": uuid.uuid4().hex}
        answer = self.ask("POST", f"/hospitals/{HOSPITAL}/adaptations", json=body, headers=key)
        answer.raise_for_status()
        self.accepted.append(str(answer.json()["id"]))
        return self.accepted[-1]

    # ------------------------------------------------------------------ looked up

    def job(self, job_id: str) -> Job:
        """The job's row, read from the database without the API."""
        with self.database.read() as session:
            return records.get(session, job_id)

    def over(self, *jobs: str) -> bool:
        """Whether every given job has ended; all accepted jobs when none is given."""
        return all(self.job(job).state in TERMINAL for job in jobs or self.accepted)

    def held(self, stage: str | None = None) -> list[Held]:
        """The jobs that workers have, in this stage or in any."""
        with self.database.read() as session:
            jobs = session.scalars(select(Job).where(Job.state.in_(HELD)).order_by(Job.created_at))
            found = [
                Held(job.id, job.progress.get("stage", ""), job.token, int(job.owner.rsplit(":", 1)[1]))
                for job in jobs
                if job.owner is not None
            ]
        return [one for one in found if stage is None or one.stage == stage]

    def held_in(self, stage: str, job: str | None = None, *, after: int = 0) -> Held:
        """Wait until a worker has a job in this stage: this job or a new one, under a token beyond `after`.

        A worker that was just killed still appears to have its job until the lease expires, hence `after`. A
        stage can end between two polls: a job that was missed in this way is followed by a new one.
        """
        awaited = job or self.submit()

        def seen() -> Held | bool:
            found = [held for held in self.held(stage) if held.job == awaited and held.token > after]
            return found[0] if found else self.over(awaited)

        held = self.until(seen)
        return held if isinstance(held, Held) else self.held_in(stage)

    def states(self, job_id: str) -> list[str]:
        """Every state of the job in order, from its events."""
        with self.database.read() as session:
            return [event.data["state"] for event in records.events_of_type(session, job_id, "state")]

    def published(self) -> list[str]:
        """The job of each version that is visible in the store, oldest first."""
        store = self.settings.open_store()
        name = adapted_name(NAME, HOSPITAL)
        if not store.versions.numbers(name):
            return []
        return [version.artefact.manifest.lineage.run for version in store.versions.of(name)]
