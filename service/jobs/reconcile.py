"""The reconciler: requeue orphaned jobs, resend lost messages and delete expired files.

    its worker sends no heartbeat    queued again, or failed after `max_attempts`; cancelled if requested
    its message is lost              sent again: Redis was down, was flushed, or a worker died with it
    its files, or a cohort's, expire deleted
    what was observed                the watch looks at it

Every API process runs it. Two at once do no harm: each change is a transaction that checks again under a
lock, and a duplicate message finds its job claimed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import get_args

from redis import RedisError
from sqlalchemy import ColumnElement, func, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from service.database import Database, Job, database_now
from service.database.job_states import HELD, TERMINAL, JobState
from service.errors import BrokerError
from service.files import log_and_continue
from service.job_kinds import KINDS
from service.jobs import records
from service.jobs.files import JobFolder
from service.jobs.submission import send
from service.runtime.metrics import Metrics
from service.runtime.queue import Queue
from service.settings import Settings


class JobStatistics:
    """Metrics of all jobs by one API process; durations cover the jobs that ended while it ran."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._since = datetime.now(UTC)

    def read(self, database: Database) -> None:
        """Read the counts once."""
        counts = select(Job.kind, Job.state, func.count()).group_by(Job.kind, Job.state)
        ended = select(Job).where(Job.finished_at > self._since).order_by(Job.finished_at)
        with database.read() as session:
            found = {(kind, state): count for kind, state, count in session.execute(counts)}
            for job in session.scalars(ended):
                if job.finished_at is not None and job.started_at is not None:
                    seconds = (job.finished_at - job.started_at).total_seconds()
                    self._metrics.job_seconds.labels(job.kind, job.state).observe(seconds)
                self._since = job.finished_at or self._since
        for kind in KINDS:
            for state in get_args(JobState):
                self._metrics.jobs.labels(kind, state).set(found.get((kind, state), 0))


_EXPIRE_EVERY_SECONDS = 60.0
_log = logging.getLogger("locum.service")


class Reconciler:
    """Reconciles every `reconcile_every_seconds`, and calls `expire` once a minute."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        queue: Queue,
        metrics: Metrics,
        expire: Callable[[], None],
        observe: Callable[[], object],
    ) -> None:
        self._settings = settings
        self._database = database
        self._queue = queue
        self._metrics = metrics
        self._expire = expire
        self._observe = observe
        self._statistics = JobStatistics(metrics)
        self._expired_at = float("-inf")

    async def watch(self) -> None:
        """Poll until cancelled. Database and Redis outages are reported by the readiness check."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except (SQLAlchemyError, RedisError, BrokerError, OSError) as error:
                _log.debug("jobs could not be looked after: %s", type(error).__name__)
            except Exception:
                # A bug: log it, and keep polling.
                _log.exception("looking after jobs: an unexpected error; it is tried again")
            await asyncio.sleep(self._settings.reconcile_every_seconds)

    def look(self) -> None:
        """Reconcile once."""
        self._recover()
        if time.monotonic() - self._expired_at > _EXPIRE_EVERY_SECONDS:
            self._expired_at = time.monotonic()
            self._expire()
        self._observe()
        self._statistics.read(self._database)
        self._resend()

    def _recover(self) -> None:
        """Requeue, fail or cancel the jobs of workers without a heartbeat within their lease."""
        lost = or_(
            Job.state.in_(HELD) & (Job.lease_until < self._now()),
            (Job.state == "queued") & (Job.attempt >= self._settings.max_attempts),
        )
        for job_id in self._matching(lost):
            with self._database.write() as session:
                # Another process may hold the lock because it does the same, or because the worker is back.
                query = select(Job).where(Job.id == job_id, lost).with_for_update(skip_locked=True)
                job = session.scalars(query).first()
                if job is None:
                    continue
                over = self._take_from_worker(job)
                records.transition(session, job, *over)
                _log.warning("job %s lost its worker: %s", job.id, over[0])
                if job.state in TERMINAL:
                    records.expire_files_now(job)
            # After the commit: storage that answers slowly must not hold the row.
            if job.state in TERMINAL:
                with log_and_continue(f"the files of job {job_id}"):
                    JobFolder(self._settings.open_files(), job_id).delete()

    def _take_from_worker(self, job: Job) -> tuple[JobState, str | None]:
        if job.state == "cancelling":
            return "cancelled", "cancelled; the worker that ran it was gone"
        if job.attempt >= self._settings.max_attempts:
            stage = job.progress.get("stage")
            return (
                "failed",
                f"its worker was lost {job.attempt} times{f', last while {stage}' if stage else ''}: the "
                "worker's log may say why (out of memory, or killed?). Submit it again, with fewer or "
                "smaller scans if memory was short",
            )
        return "queued", None

    def _resend(self) -> None:
        """Send messages that were never sent, and those of jobs that wait although their message is lost."""
        due = (Job.state == "queued") & or_(Job.retry_at.is_(None), Job.retry_at <= self._now())
        waiting = self._matching(due)
        messages = self._queue.waiting()
        self._metrics.queue_messages.set(messages)
        if not waiting:
            return
        unsent: ColumnElement[bool] = Job.queued_at.is_(None)
        # With a message for every job, the queue is only long. Messages of jobs that were taken already can
        # hide that one is missing, until a worker has thrown them away.
        if messages < len(waiting):
            before = datetime.now(UTC) - timedelta(seconds=self._settings.resend_seconds)
            unsent = or_(unsent, Job.queued_at < before)
        for job_id in self._matching(due & unsent):
            now = datetime.now(UTC)
            with self._database.write() as session:
                mine = session.scalar(
                    update(Job)
                    .where(Job.id == job_id, Job.state == "queued", unsent)
                    .values(queued_at=now)
                    .returning(Job.id)
                    .execution_options(synchronize_session=False)
                )
            if mine is not None and not send(self._database, self._queue, job_id):
                return

    def _now(self) -> datetime:
        with self._database.read() as session:
            return database_now(session)

    def _matching(self, condition: ColumnElement[bool]) -> list[str]:
        with self._database.read() as session:
            return list(session.scalars(select(Job.id).where(condition).order_by(Job.created_at)))
