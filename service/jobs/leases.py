"""Leases: one worker at a time may work on a job, as long as it sends heartbeats.

    lease = claim(database, job_id, owner, settings)     None: not available
    renew(database, lease)                               every few seconds; lost, or to be cancelled?
    with fenced(database, lease) as (session, job): ...  every write; rejected once the lease is lost
    finish(database, lease, "succeeded", ...)            the last write
    postpone(database, lease, until, why)                or: back to the queue

A worker that was suspended for longer than its lease does not know that it lost it. So every claim takes the
next fencing token, and a write under an older token is rejected (Kleppmann, "How to do distributed locking",
2016). Times are by the database's clock, because those of the machines may differ by more than a lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import and_, func, literal, or_, update
from sqlalchemy.orm import Session

from service import observation
from service.audit import trail
from service.database import Database, Job, database_now
from service.database.job_states import HELD, JobEnd
from service.database.models import UtcDateTime
from service.errors import LeaseLost
from service.job_kinds import KINDS
from service.jobs import records
from service.observation import Answer, Observed
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
    """The answer to a heartbeat. `lost`: stop, and write nothing. `cancel`: stop, and finish as cancelled."""

    lost: bool
    cancel: bool


def claim(database: Database, job_id: str, owner: str, settings: Settings) -> Lease | None:
    """Claim a job that waits, or that lost its worker: its lease expired without a heartbeat.

    Return None for a job that cannot be claimed: unknown, finished, leased, being cancelled, postponed, or
    out of attempts.
    """
    with database.write() as session:
        now = database_now(session)
        expired = and_(Job.state == "running", Job.lease_until < now)
        statement = (
            update(Job)
            .where(
                Job.id == job_id,
                or_(Job.state == "queued", expired),
                Job.cancel_requested.is_(False),
                or_(Job.retry_at.is_(None), Job.retry_at <= now),
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
        # One statement: the second of two claimers finds nothing to update, on every database.
        if session.scalar(statement) is None:
            return None
        job = records.get(session, job_id)
        records.append_event(session, job, "state", {"state": "running", "attempt": job.attempt})
        return Lease(job_id, job.token, job.attempt, owner, settings.lease_seconds)


def renew(database: Database, lease: Lease) -> RenewState:
    """Renew the lease. An expired lease that no other worker has claimed becomes valid again."""
    with database.write() as session:
        statement = (
            update(Job)
            .where(Job.id == lease.job_id, Job.token == lease.token, Job.state.in_(HELD))
            .values(lease_until=database_now(session) + timedelta(seconds=lease.seconds))
            .returning(Job.cancel_requested)
        )
        cancel = session.scalar(statement)
    return RenewState(lost=cancel is None, cancel=bool(cancel))


@contextmanager
def fenced(database: Database, lease: Lease) -> Iterator[tuple[Session, Job]]:
    """Open a writing transaction on the job, for the holder of the lease only.

    Raises:
        LeaseLost: another worker claimed the job, or it is finished.
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
    observed: Observed | None = None,
) -> None:
    """End the job. An argument of None leaves the stored value.

    Args:
        database: where the job is.
        lease: of the worker that ends the job.
        state: how it ended.
        reason: in words; required unless the state is `succeeded`.
        result: JSON for the job's record.
        gate: the verdict on the candidate.
        candidate: (name, version, digest) of the version that was published.
        observed: what is stored of the answer that is the job's result.

    Raises:
        LeaseLost: another worker ends it, or has ended it.
    """
    with fenced(database, lease) as (session, job):
        if result is not None:
            job.result = result
        if gate is not None:
            job.gate = gate
        if candidate is not None:
            job.candidate_name, job.candidate_version, job.candidate_digest = candidate
        records.transition(session, job, state, reason)
        if candidate is not None:
            details = {
                "artefact": f"{candidate[0]}@{candidate[1]}",
                "job": job.id,
                "started_by": job.actor,
                "gate": None if job.gate is None else job.gate.get("passed"),
            }
            version = candidate[2]
            trail.append(session, "version.adapted", hospital=job.hospital, version=version, details=details)
        if KINDS[job.kind].accepts and result is not None:
            trail.append(
                session,
                "acceptance.measured",
                hospital=job.hospital,
                version=job.parent,
                actor=result["report"]["measured_by"],
                details={"job": job.id, "verdict": result["report"]["verdict"], "digest": result["digest"]},
            )
        if KINDS[job.kind].answers and job.cancel_requested:
            # The client that cancelled it, or left, does not fetch a mask that was made before the stop.
            records.expire_files_now(job)
        if observed is not None:
            request = job.request_id or job.id
            answer = Answer(observed, job.hospital, job.actor or "service", request, KINDS[job.kind].way)
            observation.append(session, [answer])


def postpone(database: Database, lease: Lease, until: datetime, why: str) -> bool:
    """Return the job to the queue until a time, because another system does not answer.

    It does not count as an attempt: `max_attempts` bounds the lost workers. `until` is by this process's
    clock. `why` is shown to the job's readers. A job that is to be cancelled ends.

    Returns:
        whether the job waits.

    Raises:
        LeaseLost: another worker has the job.
    """
    with fenced(database, lease) as (session, job):
        if job.cancel_requested:
            records.transition(session, job, "cancelled", f"cancelled while it waited: {why}")
            return False
        job.retry_at = database_now(session) + (until - datetime.now(UTC))
        job.attempt -= 1
        again = job.retry_at.isoformat(timespec="seconds")
        job.progress = {"stage": "waiting", "why": why, "retry_at": again}
        records.transition(session, job, "queued")
        records.append_event(session, job, "progress", job.progress)
        return True
