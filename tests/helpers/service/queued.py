"""Jobs in the queue, without the request that would make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from service.database import Job
from service.job_kinds import KINDS
from service.jobs import records
from service.jobs.records import Asked, Work
from service.settings import Settings


def queued(
    session: Session,
    settings: Settings,
    asked: Asked | None = None,
    *,
    kind: str = "adaptation",
    hospital: str | None = "north",
    model: str = "brain",
    parent: str = "sha256:" + "0" * 64,
    cohort: str | None = None,
    options: Mapping[str, Any] | None = None,
    job_id: str | None = None,
) -> Job:
    """Add a job, of whatever parent."""
    work = Work(
        kind=KINDS[kind], hospital=hospital, model=model, parent=parent, cohort=cohort, options=options or {}
    )
    return records.create(session, settings, work, asked or Asked(), job_id=job_id)
