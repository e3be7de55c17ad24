"""The tables of long work: cohorts of scans, the jobs over them, and what happened in each job."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, String, Text, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column

from service.database.models import Base, UtcDateTime


class Cohort(Base):
    """Scans that a hospital uploaded for jobs. The row outlives them: `deleted_at` says when they went."""

    __tablename__ = "cohort"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    hospital: Mapped[str] = mapped_column(ForeignKey("hospital.id"), index=True)
    note: Mapped[str | None] = mapped_column(String(200))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    deleted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class CohortScan(Base):
    """One scan. Its file is called by `sha256` (64 hex digits); `name` is the client's and never a path."""

    __tablename__ = "cohort_scan"
    __table_args__ = (UniqueConstraint("cohort", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    cohort: Mapped[str] = mapped_column(ForeignKey("cohort.id"))
    name: Mapped[str] = mapped_column(String(200))
    sha256: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger)
    format: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class CohortMask(Base):
    """The mask of one scan, drawn by the hospital; its file lies beside the scan's, called by `sha256`.

    `label_values` are the values that occur in it, ascending.
    """

    __tablename__ = "cohort_mask"

    scan: Mapped[int] = mapped_column(ForeignKey("cohort_scan.id"), primary_key=True, autoincrement=False)
    cohort: Mapped[str] = mapped_column(ForeignKey("cohort.id"), index=True)
    sha256: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger)
    format: Mapped[str] = mapped_column(String(16))
    label_values: Mapped[list[int]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class Job(Base):
    """Long work that was accepted. This row, not the message in Redis, is the job.

    `token` is the fencing token: it grows with every claim, and a worker whose token is not the row's may
    write nothing. `queued_at` is when a message was last sent; null when one has to be sent at once.
    """

    __tablename__ = "job"
    __table_args__ = (
        UniqueConstraint("hospital", "idempotency_key"),
        Index("ix_job_state_created_at", "state", "created_at"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    hospital: Mapped[str | None] = mapped_column(ForeignKey("hospital.id"))
    model: Mapped[str] = mapped_column(String(200))
    parent: Mapped[str] = mapped_column(String(71))
    cohort: Mapped[str | None] = mapped_column(ForeignKey("cohort.id"), index=True)
    options: Mapped[dict[str, Any]] = mapped_column(JSON)

    state: Mapped[str] = mapped_column(String(16))
    attempt: Mapped[int] = mapped_column(default=0)
    token: Mapped[int] = mapped_column(default=0)
    owner: Mapped[str | None] = mapped_column(String(200))
    lease_until: Mapped[datetime | None] = mapped_column(UtcDateTime)
    cancel_requested: Mapped[bool] = mapped_column(default=False, server_default=false())

    progress: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    gate: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    candidate_name: Mapped[str | None] = mapped_column(String(200))
    candidate_version: Mapped[int | None]
    candidate_digest: Mapped[str | None] = mapped_column(String(71))
    reason: Mapped[str | None] = mapped_column(Text)

    idempotency_key: Mapped[str | None] = mapped_column(String(200))
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[str | None] = mapped_column(String(36))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    queued_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)


class JobEvent(Base):
    """One thing that happened in a job. The ids grow within a job, so that a reader can resume after one."""

    __tablename__ = "job_event"
    __table_args__ = (Index("ix_job_event_job_id", "job", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("job.id"))
    type: Mapped[str] = mapped_column(String(16))
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    data: Mapped[dict[str, Any]] = mapped_column(JSON)
