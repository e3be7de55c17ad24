"""What happened in a job, in order: written beside the job's own row, read by whoever follows it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Job, JobEvent

EventType = Literal["state", "epoch", "progress", "gate", "warning"]


def append(session: Session, job: Job, event_type: EventType, data: Mapping[str, Any]) -> JobEvent:
    """Note that something happened. In the transaction that changes the job: both are seen, or neither.

    `data` must be JSON; of an `epoch` its record, with `coefficients` {layers, models, values [L][E]}.
    """
    event = JobEvent(job=job.id, type=event_type, at=datetime.now(UTC), data=dict(data))
    session.add(event)
    return event


def after(session: Session, job_id: str, last: int = 0, limit: int = 500) -> list[JobEvent]:
    """The events after the one with id `last`, oldest first."""
    query = select(JobEvent).where(JobEvent.job == job_id, JobEvent.id > last)
    return list(session.scalars(query.order_by(JobEvent.id).limit(limit)))


def warnings(session: Session, job_id: str) -> list[str]:
    """What the job warned of, in order."""
    return [str(event.data["message"]) for event in of_type(session, job_id, "warning")]


def of_type(session: Session, job_id: str, event_type: EventType) -> list[JobEvent]:
    """Every event of one type, oldest first."""
    query = select(JobEvent).where(JobEvent.job == job_id, JobEvent.type == event_type)
    return list(session.scalars(query.order_by(JobEvent.id)))
