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
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from service.database import Caller, Job, JobEvent, caller_of, database_now, in_turn
from service.database.job_states import HELD, TERMINAL, JobState
from service.errors import IdempotencyConflict, JobUnknown, QueueFull
from service.job_kinds import JobKind
from service.settings import Settings

EventType = Literal["state", "epoch", "progress", "gate", "warning"]

QUEUE = "what waits for a worker"
"""Lock name: holders count and add to the queue in turn, see `in_turn`."""

_ALLOWED: dict[str, frozenset[str]] = {
    "queued": frozenset({"running", "cancelled", "failed"}),
    "running": TERMINAL | {"queued", "cancelling"},
    "cancelling": TERMINAL,
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a job is to do.

    Attributes:
        kind: its declaration.
        hospital: of the scans, if the client named one.
        model: name of the requested artefact in the store; empty for none.
        parent: digest of the artefact to adapt, or that answers; empty for none.
        cohort: id; None for a job on one scan, which is stored in its folder.
        options: JSON, as the kind of the job or of the parent takes them.
    """

    kind: JobKind
    hospital: str | None
    options: Mapping[str, Any]
    model: str = ""
    parent: str = ""
    cohort: str | None = None


@dataclass(frozen=True)
class Asked:
    """The request that a job is made for.

    Attributes:
        request_id: the HTTP request's.
        key: its idempotency key.
        fingerprint: identifies the content of a request with a key.
    """

    request_id: str | None = None
    key: str | None = None
    fingerprint: str | None = None


def new_id() -> str:
    """Return an id of 32 hexadecimal digits, so that files can be named before the row exists."""
    return uuid.uuid4().hex


def create(
    session: Session,
    settings: Settings,
    work: Work,
    asked: Asked = Asked(),
    *,
    job_id: str | None = None,
    input_bytes: int | None = None,
) -> Job:
    """Add a queued job. Call `submission.send` after the transaction has committed.

    Args:
        session: of a writing transaction.
        settings: lifetime of files, limit of waiting jobs of an owner, and the device of the job's worker.
        work: what it is to do.
        asked: the request.
        job_id: from `new_id`, if files were written first.
        input_bytes: size of the scan in the job's folder.

    Raises:
        QueueFull: the hospital has as many waiting jobs as the limit allows.
    """
    in_turn(session, QUEUE)
    check_queue(session, settings, work.hospital)
    now = datetime.now(UTC)
    job = Job(
        id=job_id or new_id(),
        kind=work.kind.name,
        hospital=work.hospital,
        model=work.model,
        parent=work.parent,
        cohort=work.cohort,
        input_bytes=input_bytes,
        device_class=None if settings.jobs_on == "any" else settings.jobs_on,
        options=dict(work.options),
        state="queued",
        attempt=0,
        token=0,
        progress={},
        idempotency_key=asked.key,
        fingerprint=asked.fingerprint,
        request_id=asked.request_id,
        actor=caller_of(session).actor,
        created_at=now,
        queued_at=now,
        expires_at=now + timedelta(days=settings.job_files_lifetime_days),
    )
    session.add(job)
    session.flush()
    append_event(session, job, "state", {"state": "queued", "attempt": 0})
    return job


def check_queue(session: Session, settings: Settings, hospital: str | None) -> None:
    """Raise QueueFull if the hospital, or the caller without one, has as many waiting jobs as allowed.

    A PACS that is down can keep a hospital's jobs waiting for days. Those of others need not wait for them.
    """
    query = select(func.count()).where(Job.state == "queued", of_owner(session, hospital))
    waiting = session.scalar(query) or 0
    if waiting >= settings.max_waiting_jobs:
        owner = "of yours" if hospital is None else f"of hospital '{hospital}'"
        raise QueueFull(
            f"{waiting} jobs {owner} wait, the most allowed (LOCUM_MAX_WAITING_JOBS): send it again when "
            "GET /jobs?state=queued names fewer; a job that is not needed can be deleted"
        )


def get(session: Session, job_id: str, *, lock: bool = False) -> Job:
    """Return the job; `lock` blocks other writers until the transaction ends.

    Raises:
        JobUnknown: it does not exist, or the caller may not see its hospital.
    """
    found = session.get(Job, job_id, with_for_update=lock, populate_existing=lock)
    if found is None or not _sees(caller_of(session), found):
        raise JobUnknown(f"no job {job_id!r}: GET /jobs lists those that there are")
    return found


def _sees(caller: Caller, job: Job) -> bool:
    """A job of no hospital, which one scan has, is its maker's and that of callers who see every hospital."""
    if job.hospital is None and caller.hospitals is not None:
        return job.actor == caller.actor
    return caller.sees(job.hospital)


def find_by_idempotency_key(session: Session, hospital: str, key: str) -> Job | None:
    """Return the job of this idempotency key, whatever its request."""
    return session.scalars(select(Job).where(Job.hospital == hospital, Job.idempotency_key == key)).first()


def replayed(session: Session, hospital: str, asked: Asked) -> Job | None:
    """Return the job of the request's idempotency key; None for a new key, and without one.

    Raises:
        IdempotencyConflict: the key belongs to another request.
    """
    found = None if asked.key is None else find_by_idempotency_key(session, hospital, asked.key)
    if found is not None and found.fingerprint != asked.fingerprint:
        raise IdempotencyConflict(
            f"the Idempotency-Key was used for job {found.id} with another request: "
            "use a new key for a new request"
        )
    return found


def listed(
    session: Session,
    hospital: str | None = None,
    state: JobState | None = None,
    limit: int = 100,
    after: str | None = None,
) -> list[Job]:
    """List jobs, newest first, of the hospitals that the caller may see.

    `after` is the id of a job: only those after it in this order are listed. Raises JobUnknown.
    """
    query = select(Job)
    visible = caller_of(session).hospitals
    if visible is not None:
        own = and_(Job.hospital.is_(None), Job.actor == caller_of(session).actor)
        query = query.where(or_(Job.hospital.in_(visible), own))
    if hospital is not None:
        query = query.where(Job.hospital == hospital)
    if state is not None:
        query = query.where(Job.state == state)
    if after is not None:
        last = get(session, after)
        # The first condition lets a database start in the index.
        query = query.where(Job.created_at <= last.created_at)
        query = query.where(or_(Job.created_at < last.created_at, Job.id > last.id))
    return list(session.scalars(query.order_by(Job.created_at.desc(), Job.id).limit(limit)))


def count(session: Session, hospital: str, kind: JobKind, parent: str) -> int:
    """Count the jobs of a kind of a hospital on a version, by its digest, whatever became of them."""
    query = select(func.count()).where(Job.hospital == hospital, Job.kind == kind.name, Job.parent == parent)
    return session.scalar(query) or 0


_owner = func.coalesce(Job.hospital, Job.actor, "")
"""The job's hospital, or its maker. The jobs of an owner are taken by age, and the owners take turns."""


def of_owner(session: Session, hospital: str | None) -> ColumnElement[bool]:
    """Condition: the job has the owner of a new one for this hospital, or for the caller without one."""
    return _owner == (hospital or caller_of(session).actor)


def _due(session: Session) -> ColumnElement[bool]:
    """Condition: a worker may take the job now."""
    return and_(Job.state == "queued", or_(Job.retry_at.is_(None), Job.retry_at <= database_now(session)))


def turns(session: Session, device_class: str | None = None) -> list[str]:
    """List the next job of each hospital in the order in which workers take them: fair between hospitals.

    Only jobs of this device class: each class has a queue of messages, and a message finds jobs of its class.

    First is the hospital with the fewest running jobs, then the one of which a job began the longest ago. The
    oldest job of a hospital is its next. A job of no hospital counts for its maker.
    """
    alike = Job.device_class.is_not_distinct_from(device_class)
    waiting = select(Job.id, _owner).where(_due(session), alike).order_by(Job.created_at, Job.id)
    heads: dict[str, str] = {}
    for job_id, of in session.execute(waiting):
        heads.setdefault(of, job_id)
    running = select(_owner, func.count()).where(Job.state.in_(HELD)).group_by(_owner)
    at_work = {row[0]: row[1] for row in session.execute(running)}
    begun = select(_owner, func.max(Job.started_at)).where(_owner.in_(list(heads))).group_by(_owner)
    last = {of: began.timestamp() for of, began in session.execute(begun) if began is not None}
    # A sort keeps the order of those that are alike: that of their oldest jobs.
    return [heads[of] for of in sorted(heads, key=lambda of: (at_work.get(of, 0), last.get(of, 0.0)))]


def queue_position(session: Session, job: Job) -> int | None:
    """Number of the owner's jobs that workers take before this one; None if it does not wait.

    Jobs of other owners are not counted: they are taken in turns with it, and its readers may not see them.
    Nor are jobs for workers on another device.
    """
    if job.state != "queued":
        return None
    owner = job.hospital or job.actor or ""
    alike = Job.device_class.is_not_distinct_from(job.device_class)
    query = select(func.count()).where(_due(session), alike, _owner == owner, Job.created_at < job.created_at)
    return session.scalar(query)


def cancel(session: Session, job_id: str) -> Job:
    """Cancel a job: at once if it waits, at its worker's next step if it runs. A finished job stays as it is.

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
    """Expire the files of a finished job now.

    A worker that does not know yet that it lost the job may write another file; the reconciler deletes it.
    """
    job.expires_at = min(job.expires_at, datetime.now(UTC))


def transition(session: Session, job: Job, state: JobState, reason: str | None = None) -> None:
    """Move a locked job to another state, and append the event.

    A job that ends or returns to the queue loses its lease. Raises ValueError for a transition that does not
    exist.
    """
    if state not in _ALLOWED.get(job.state, frozenset()):
        raise ValueError(f"job {job.id}: no way leads from {job.state} to {state}")
    # By the clock that `started_at` is by.
    now = database_now(session)
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
    """Append an event in the transaction that changes the job, so that both are visible or neither.

    `data` must be JSON; of an `epoch` its record, with `coefficients` {layers, models, values [L][E]}.
    """
    event = JobEvent(job=job.id, type=event_type, at=datetime.now(UTC), data=dict(data))
    session.add(event)
    return event


EVENTS_AT_ONCE = 500


def events_after(session: Session, job_id: str, last: int = 0, limit: int = EVENTS_AT_ONCE) -> list[JobEvent]:
    """List the events after the one with id `last`, oldest first."""
    query = select(JobEvent).where(JobEvent.job == job_id, JobEvent.id > last)
    return list(session.scalars(query.order_by(JobEvent.id).limit(limit)))


def warnings_of(session: Session, job_id: str) -> list[str]:
    """List the job's warnings, in order."""
    return [str(event.data["message"]) for event in events_of_type(session, job_id, "warning")]


def events_of_type(session: Session, job_id: str, event_type: EventType) -> list[JobEvent]:
    """List every event of one type, oldest first."""
    query = select(JobEvent).where(JobEvent.job == job_id, JobEvent.type == event_type)
    return list(session.scalars(query.order_by(JobEvent.id)))
