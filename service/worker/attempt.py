"""One worker's attempt at one job: heartbeat, cancellation, progress and events."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pkgutil import resolve_name
from types import TracebackType
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from model_store.artefact import Artefact
from service.database import Database, Job
from service.database.job_states import JobEnd
from service.errors import FileDamaged, JobCancelled, LeaseLost
from service.inference.volumes import Between, Checked
from service.job_kinds import KINDS
from service.jobs import records
from service.jobs.files import JobFolder
from service.jobs.leases import Lease, fenced, renew
from service.jobs.records import EventType
from service.observation import Observed
from service.settings import Settings


@dataclass(frozen=True)
class AttemptOutcome:
    """Arguments for `service.jobs.leases.finish`. `reason` is required unless the state is `succeeded`."""

    state: JobEnd
    reason: str | None = None
    result: dict[str, Any] | None = None
    gate: dict[str, Any] | None = None
    candidate: tuple[str, int, str] | None = None
    observed: Observed | None = None


class Postponed(Exception):
    """The job waits for another system: it returns to the queue until a time. `str` says why."""

    def __init__(self, why: str, until: datetime) -> None:
        super().__init__(why)
        self.until = until


@dataclass(frozen=True)
class PublishedCandidate:
    """A candidate that a job published, with the result and verdict that the job keeps."""

    artefact: Artefact
    result: dict[str, Any]
    gate: dict[str, Any] | None

    def outcome(self, fallback_reason: str) -> AttemptOutcome:
        """Return the end of the job. `fallback_reason` is the reason if it fell back without a stop."""
        result, candidate = self.result, (self.artefact.name, self.artefact.version, self.artefact.digest)
        if not result.get("fell_back"):
            return AttemptOutcome("succeeded", result.get("stopped"), result, self.gate, candidate)
        reason = result.get("stopped") or fallback_reason
        return AttemptOutcome("fell_back", reason, result, self.gate, candidate)


_log = logging.getLogger("locum.worker")

# Upper limit of the interval: a cancelled job must free the cores within seconds, even with a long lease.
_LONGEST_BEAT_SECONDS = 2.0


class Attempt:
    """Holds the lease of a job inside `with`. Only the heartbeat runs in another thread."""

    def __init__(self, database: Database, lease: Lease, settings: Settings) -> None:
        self.database = database
        self.lease = lease
        self.settings = settings
        self.stage = "preparing"
        with database.read() as session:
            self.job: Job = records.get(session, lease.job_id)
        self.kind = KINDS[self.job.kind]
        self.folder = JobFolder(settings.open_files(), lease.job_id)
        self._lost = threading.Event()
        self._cancelled = threading.Event()
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, name=f"lease-{lease.job_id}", daemon=True)

    def __enter__(self) -> Attempt:
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._heart.join()

    @cached_property
    def options(self) -> Any:
        """The job's options, of the type that its kind declares. Raises pydantic's ValidationError."""
        assert self.kind.options is not None
        return resolve_name(self.kind.options).model_validate(self.job.options)

    # ------------------------------------------------------------------ cancellation

    def check_cancelled(self) -> None:
        """Raise if the work must stop. Call it before every small step.

        Raises:
            LeaseLost: another worker has the job; write nothing more.
            JobCancelled: a client cancelled the job.
        """
        if self._lost.is_set():
            raise LeaseLost(f"job {self.lease.job_id}: its lease went to another worker; this one stops")
        if self._cancelled.is_set():
            raise JobCancelled(f"cancelled while {self.stage}")

    @property
    def between(self) -> Between:
        """Ends the work on a scan where `check_cancelled` raises."""
        return Checked(self.check_cancelled)

    def _beat(self) -> None:
        interval = min(self.lease.seconds / 4, _LONGEST_BEAT_SECONDS)
        while not self._over.wait(interval):
            try:
                told = renew(self.database, self.lease)
            except SQLAlchemyError as error:
                # Fencing protects every write, so a short database outage is no reason to stop.
                _log.warning("job %s: no heartbeat: %s", self.lease.job_id, type(error).__name__)
                continue
            if told.lost:
                self._lost.set()
                return
            if told.cancel:
                self._cancelled.set()

    def read_checkpoint(self) -> bytes | None:
        """Return the checkpoint of an earlier attempt; None without one. A damaged one is warned of."""
        try:
            return self.folder.read(self.folder.CHECKPOINT)
        except FileDamaged as error:
            self.warn(f"the job starts over: {error}")
            return None

    # ------------------------------------------------------------------ progress and events

    def set_stage(self, stage: str, **more: Any) -> None:
        """Record a new stage, or progress within it.

        Raises as `check_cancelled`; ValueError for a stage that the job's kind does not declare.
        """
        self.check_cancelled()
        if stage not in self.kind.stages:
            raise ValueError(
                f"jobs of kind '{self.kind.name}' have no stage '{stage}': declare it, with words for it, in "
                "service/job_kinds"
            )
        self.stage = stage
        progress = {"stage": stage, **more}
        with fenced(self.database, self.lease) as (session, job):
            if job.progress != progress:
                job.progress = progress
                records.append_event(session, job, "progress", progress)

    def emit(self, event_type: EventType, data: Mapping[str, Any]) -> None:
        """Append an event. Raises LeaseLost."""
        with fenced(self.database, self.lease) as (session, job):
            records.append_event(session, job, event_type, as_json(data))

    def warn(self, message: str) -> None:
        """Append a warning, unless this or an earlier attempt did so. Raises LeaseLost."""
        with fenced(self.database, self.lease) as (session, job):
            said = records.warnings_of(session, job.id)
            if message not in said:
                records.append_event(session, job, "warning", {"message": message})


def as_json(value: Any) -> Any:
    """Convert for JSON: tuples become lists, NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
