"""Records and events of jobs: create, find, and move from state to state.

    queued ──> running ──> succeeded | fell_back | failed
      │  ▲        │  │
      │  └────────┘  └──> cancelling ──> cancelled (or an end that came first)
      └──> cancelled | failed

A job that lost its worker goes from running back to queued; see `service.jobs.reconcile`. Functions take a
session, so that the caller chooses the transaction.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.database import Job, JobEvent, caller_of, in_turn
from service.errors import IdempotencyConflict, JobUnknown, QueueFull
from service.jobs.states import HELD, TERMINAL, JobKind, JobState
from service.settings import Settings

EventType = Literal["state", "epoch", "progress", "gate", "warning"]

QUEUE = "what waits for a worker"
"""Lock name: holders count and add to the queue in turn, see `in_turn`."""

_ALLOWED: dict[str, frozenset[str]] = {
    "queued": frozenset({"running", "cancelled", "failed"}),
    "running": TERMINAL | {"queued", "cancelling"},
    "cancelling": TERMINAL,
}


def new_id() -> str:
    """For a job: 32 hexadecimal digits. Its files can so be named before its row is there."""
    return uuid.uuid4().hex


def create(
    session: Session,
    settings: Settings,
    *,
    kind: JobKind,
    hospital: str | None,
    model: str,
    parent: str,
    cohort: str | None,
    options: Mapping[str, Any],
    job_id: str | None = None,
    idempotency_key: str | None = None,
    fingerprint: str | None = None,
    request_id: str | None = None,
) -> Job:
    """Add a queued job. Once the transaction has committed, `submission.send` tells the worker.

    Args:
        session: of a writing transaction.
        settings: for how long its files are kept, and how many jobs may wait.
        kind: what a worker is to do.
        hospital: of the scans, if the client named one.
        model: name in the store of the artefact that was asked for.
        parent: digest of the artefact that the work begins with.
        cohort: id; None for a job on one scan, which is stored in its folder.
        options: JSON, as the kind of the job and of the parent takes them.
        job_id: from `new_id`, where files were written first.
        idempotency_key: the client's.
        fingerprint: of the request that the key stands for.
        request_id: the HTTP request's.

    Raises:
        QueueFull: as many wait as may.
    """
    in_turn(session, QUEUE)
    check_queue(session, settings)
    now = datetime.now(UTC)
    job = Job(
        id=job_id or new_id(),
        kind=kind,
        hospital=hospital,
        model=model,
        parent=parent,
        cohort=cohort,
        options=dict(options),
        state="queued",
        attempt=0,
        token=0,
        progress={},
        idempotency_key=idempotency_key,
        fingerprint=fingerprint,
        request_id=request_id,
        created_at=now,
        queued_at=now,
        expires_at=now + timedelta(days=settings.job_files_lifetime_days),
    )
    session.add(job)
    session.flush()
    append_event(session, job, "state", {"state": "queued", "attempt": 0})
    return job


def check_queue(session: Session, settings: Settings) -> None:
    """Raise QueueFull unless one more job may wait."""
    waiting = session.scalar(select(func.count()).where(Job.state == "queued")) or 0
    if waiting >= settings.max_waiting_jobs:
        raise QueueFull(
            f"{waiting} jobs wait for a worker, which is the limit here (LOCUM_MAX_WAITING_JOBS): send it "
            "again when GET /jobs?state=queued names fewer; a job that is not needed can be deleted"
        )


def get(session: Session, job_id: str, *, lock: bool = False) -> Job:
    """Return the job; `lock` blocks other writers until the transaction ends.

    Raises:
        JobUnknown: there is none, or it is of a hospital that the caller may not see.
    """
    found = session.get(Job, job_id, with_for_update=lock, populate_existing=lock)
    if found is None or not caller_of(session).sees(found.hospital):
        raise JobUnknown(f"no job {job_id!r}: GET /jobs lists those that there are")
    return found


def find_by_idempotency_key(session: Session, hospital: str, key: str) -> Job | None:
    """The job that this idempotency key made, of whatever request."""
    return session.scalars(select(Job).where(Job.hospital == hospital, Job.idempotency_key == key)).first()


def replayed(session: Session, hospital: str, key: str, fingerprint: str) -> Job | None:
    """The job that this idempotency key made before; None for a new key.

    Raises:
        IdempotencyConflict: the key made a job of another request.
    """
    found = find_by_idempotency_key(session, hospital, key)
    if found is not None and found.fingerprint != fingerprint:
        raise IdempotencyConflict(
            f"the Idempotency-Key was used for job {found.id} with another request: "
            "use a new key for a new request"
        )
    return found


def listed(
    session: Session, hospital: str | None = None, state: JobState | None = None, limit: int = 100
) -> list[Job]:
    """Jobs, newest first: all of them, or those of the hospitals that the caller may see."""
    query = select(Job)
    visible = caller_of(session).hospitals
    if visible is not None:
        query = query.where(Job.hospital.in_(visible))
    if hospital is not None:
        query = query.where(Job.hospital == hospital)
    if state is not None:
        query = query.where(Job.state == state)
    return list(session.scalars(query.order_by(Job.created_at.desc(), Job.id).limit(limit)))


def queue_position(session: Session, job: Job) -> int | None:
    """How many queued jobs were accepted before this one; None once it does not wait any more."""
    if job.state != "queued":
        return None
    query = select(func.count()).where(Job.state == "queued", Job.created_at < job.created_at)
    return session.scalar(query)


def cancel(session: Session, job_id: str) -> Job:
    """Stop a job: at once if it waits, at its worker's next step if it runs. One that is over stays so.

    Raises:
        JobUnknown: there is none.
    """
    job = get(session, job_id, lock=True)
    if job.state == "queued":
        job.cancel_requested = True
        transition(session, job, "cancelled", "cancelled before it began")
    elif job.state == "running":
        job.cancel_requested = True
        transition(session, job, "cancelling")
    return job


def expire_files_now(job: Job) -> None:
    """From now on no file of a job that is over is kept.

    A worker that lost the job without knowing it yet may write one more; the reconciler sweeps it.
    """
    job.expires_at = min(job.expires_at, datetime.now(UTC))


def transition(session: Session, job: Job, state: JobState, reason: str | None = None) -> None:
    """Move a locked job to another state, and append the event.

    A job that ends or returns to the queue loses its lease. Raises ValueError for a transition that does not
    exist.
    """
    if state not in _ALLOWED.get(job.state, frozenset()):
        raise ValueError(f"job {job.id}: no way leads from {job.state} to {state}")
    now = datetime.now(UTC)
    job.state = state
    if reason is not None:
        job.reason = reason
    if state not in HELD:
        job.owner = job.lease_until = None
    if state == "queued":
        job.queued_at = None
    if state in TERMINAL:
        # Its files are kept as long after the end as they would have been after the beginning.
        job.expires_at = now + (job.expires_at - job.created_at)
        job.finished_at = now
    data = {"state": state, "attempt": job.attempt}
    append_event(session, job, "state", data if reason is None else {**data, "reason": reason})


def append_event(session: Session, job: Job, event_type: EventType, data: Mapping[str, Any]) -> JobEvent:
    """Note that something happened. In the transaction that changes the job: both are seen, or neither.

    `data` must be JSON; of an `epoch` its record, with `coefficients` {layers, models, values [L][E]}.
    """
    event = JobEvent(job=job.id, type=event_type, at=datetime.now(UTC), data=dict(data))
    session.add(event)
    return event


def events_after(session: Session, job_id: str, last: int = 0, limit: int = 500) -> list[JobEvent]:
    """The events after the one with id `last`, oldest first."""
    query = select(JobEvent).where(JobEvent.job == job_id, JobEvent.id > last)
    return list(session.scalars(query.order_by(JobEvent.id).limit(limit)))


def warnings_of(session: Session, job_id: str) -> list[str]:
    """What the job warned of, in order."""
    return [str(event.data["message"]) for event in events_of_type(session, job_id, "warning")]


def events_of_type(session: Session, job_id: str, event_type: EventType) -> list[JobEvent]:
    """Every event of one type, oldest first."""
    query = select(JobEvent).where(JobEvent.job == job_id, JobEvent.type == event_type)
    return list(session.scalars(query.order_by(JobEvent.id)))
