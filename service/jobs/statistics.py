"""How many jobs there are in each state, and how long they took: from the database, for Prometheus."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args

from sqlalchemy import func, select

from service.database import Database, Job
from service.jobs.records import Kind, State
from service.metrics import Metrics


class JobStatistics:
    """What one API process tells of all jobs; of durations, those of jobs that ended while it ran."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._since = datetime.now(UTC)

    def read(self, database: Database) -> None:
        """Look once."""
        counts = select(Job.kind, Job.state, func.count()).group_by(Job.kind, Job.state)
        ended = select(Job).where(Job.finished_at > self._since).order_by(Job.finished_at)
        with database.read() as session:
            found = {(kind, state): count for kind, state, count in session.execute(counts)}
            for job in session.scalars(ended):
                if job.finished_at is not None and job.started_at is not None:
                    seconds = (job.finished_at - job.started_at).total_seconds()
                    self._metrics.job_seconds.labels(job.kind, job.state).observe(seconds)
                self._since = job.finished_at or self._since
        for kind in get_args(Kind):
            for state in get_args(State):
                self._metrics.jobs.labels(kind, state).set(found.get((kind, state), 0))
