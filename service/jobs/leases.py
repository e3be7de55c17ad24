"""Who may work on a job: one worker at a time, for as long as it is heard of.

    lease = claim(database, job_id, owner, settings)     None: it is not to be had
    renew(database, lease)                               every few seconds; says if it was lost or is to stop
    with fenced(database, lease) as (session, job): ...  every write; refused once the lease is another's
    finish(database, lease, "succeeded", ...)            the last write

A worker that was stopped for longer than its lease does not know that it lost it. So every claim takes the
next fencing token, and a write under an older token is refused (Kleppmann, "How to do distributed locking",
2016). Times are by each process's own clock: clocks that disagree can only cost an attempt, because it is
the token that decides, never the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import and_, func, literal, or_, update
from sqlalchemy.orm import Session

from service.database import Database, Job
from service.database.models import UtcDateTime
from service.errors import LeaseLost
from service.jobs import records
from service.jobs.states import HELD, JobEnd
from service.settings import Settings


@dataclass(frozen=True)
class Lease:
    """The right to work on a job until `seconds` after the last `renew`."""

    job_id: str
    token: int
    attempt: int
    owner: str
    seconds: float


@dataclass(frozen=True)
class RenewState:
    """What a heartbeat learns. `lost`: stop, and write nothing. `cancel`: stop, and finish as cancelled."""

    lost: bool
    cancel: bool


def claim(database: Database, job_id: str, owner: str, settings: Settings) -> Lease | None:
    """Claim a job that waits, or that lost its worker: its lease expired without a heartbeat.

    Returns None when there is nothing to take: unknown, over, another's, to be cancelled, or out of attempts.
    """
    now = datetime.now(UTC)
    expired = and_(Job.state == "running", Job.lease_until < now)
    statement = (
        update(Job)
        .where(
            Job.id == job_id,
            or_(Job.state == "queued", expired),
            Job.cancel_requested.is_(False),
            Job.attempt < settings.max_attempts,
        )
        .values(
            state="running",
            token=Job.token + 1,
            attempt=Job.attempt + 1,
            owner=owner,
            lease_until=now + timedelta(seconds=settings.lease_seconds),
            started_at=func.coalesce(Job.started_at, literal(now, UtcDateTime())),
        )
        .returning(Job.id)
        .execution_options(synchronize_session=False)
    )
    with database.write() as session:
        # One statement, so that of two claimers one finds nothing to update, on every database.
        if session.scalar(statement) is None:
            return None
        job = records.get(session, job_id)
        records.append_event(session, job, "state", {"state": "running", "attempt": job.attempt})
        return Lease(job_id, job.token, job.attempt, owner, settings.lease_seconds)


def renew(database: Database, lease: Lease) -> RenewState:
    """Renew the lease. An expired lease that no other worker has claimed becomes valid again."""
    until = datetime.now(UTC) + timedelta(seconds=lease.seconds)
    statement = (
        update(Job)
        .where(Job.id == lease.job_id, Job.token == lease.token, Job.state.in_(HELD))
        .values(lease_until=until)
        .returning(Job.cancel_requested)
    )
    with database.write() as session:
        cancel = session.scalar(statement)
    return RenewState(lost=cancel is None, cancel=bool(cancel))


@contextmanager
def fenced(database: Database, lease: Lease) -> Iterator[tuple[Session, Job]]:
    """A writing transaction on the job, for the holder of the lease only.

    Raises:
        LeaseLost: another worker took the job, or it is over.
    """
    with database.write() as session:
        # Locked: the token cannot change between this look and the commit.
        job = session.get(Job, lease.job_id, with_for_update=True)
        if job is None or job.token != lease.token or job.state not in HELD:
            found = "gone" if job is None else f"{job.state} under token {job.token}"
            raise LeaseLost(
                f"job {lease.job_id}: this worker holds token {lease.token}, the job is {found}; it must "
                "write nothing more"
            )
        yield session, job


def finish(
    database: Database,
    lease: Lease,
    state: JobEnd,
    *,
    reason: str | None = None,
    result: dict[str, Any] | None = None,
    gate: dict[str, Any] | None = None,
    candidate: tuple[str, int, str] | None = None,
) -> None:
    """End the job. What is None stays as it was written before.

    Args:
        database: where the job is.
        lease: of the worker that ends the job.
        state: how it ended.
        reason: in words; required unless the state is `succeeded`.
        result: JSON for the job's record.
        gate: the verdict on the candidate.
        candidate: (name, version, digest) of the version that was published.

    Raises:
        LeaseLost: somebody else ends it, or has.
    """
    with fenced(database, lease) as (session, job):
        if result is not None:
            job.result = result
        if gate is not None:
            job.gate = gate
        if candidate is not None:
            job.candidate_name, job.candidate_version, job.candidate_digest = candidate
        records.transition(session, job, state, reason)
        if job.kind == "scan" and job.cancel_requested:
            # The client that cancelled it, or left, does not fetch a mask that was made before the stop.
            records.expire_files_now(job)
