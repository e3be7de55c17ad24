"""Submit a job: write its row, then send its message. Cancel one: change its row, then delete its files.

The reconciler sends a message again that could not be sent or that Redis lost. So requests are accepted while
Redis is down.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from service.database import Database, Job
from service.errors import BrokerError
from service.jobs import records
from service.jobs.files import JobFolder
from service.jobs.records import Asked
from service.runtime.queue import RUN_JOB, Queue
from service.settings import Settings

_log = logging.getLogger("locum.service")


def fingerprint(request: dict[str, Any]) -> str:
    """Return 64 hexadecimal digits that identify the content of a request."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def send(database: Database, queue: Queue, job_id: str) -> bool:
    """Send a job's message after the commit; return whether Redis accepted it."""
    with database.read() as session:
        device_class = session.scalar(select(Job.device_class).where(Job.id == job_id))
    try:
        queue.send(RUN_JOB, job_id, device_class=device_class)
    except BrokerError as error:
        _log.warning("job %s waits for Redis: %s", job_id, error)
        with database.write() as session:
            # The reconciler sends a message that was never sent at once.
            session.execute(update(Job).where(Job.id == job_id, Job.state == "queued").values(queued_at=None))
        return False
    return True


def submit(
    database: Database,
    queue: Queue,
    hospital: str,
    asked: Asked,
    create: Callable[[Session], Job],
) -> tuple[str, bool]:
    """Create a job as `create_once` does and send its message: (id, whether it is new).

    Raises:
        IdempotencyConflict: the key belongs to another request.
    """
    job, created = create_once(database, hospital, asked, create)
    if created:
        send(database, queue, job.id)
    return job.id, created


def create_once(
    database: Database, hospital: str, asked: Asked, create: Callable[[Session], Job]
) -> tuple[Job, bool]:
    """Create a job in one transaction, or find the one of the request's key: (job, whether it is new).

    Raises:
        IdempotencyConflict: the key belongs to another request.
    """
    try:
        with database.write() as session:
            before = records.replayed(session, hospital, asked)
            return (create(session), True) if before is None else (before, False)
    except IntegrityError:
        if asked.key is None:
            raise
        # The same request, sent twice at once: on a database with several writers the other one came first.
        with database.read() as session:
            before = records.replayed(session, hospital, asked)
        if before is None:
            raise
        return before, False


def cancel(database: Database, settings: Settings, job_id: str) -> Job:
    """Cancel a job as `records.cancel` does, and delete the files of one that no worker has: none will do so.

    Raises:
        JobUnknown: there is none.
    """
    with database.write() as session:
        job = records.cancel(session, job_id)
        if job.state == "cancelled":
            records.expire_files_now(job)
    if job.state == "cancelled":
        JobFolder(settings.open_files(), job_id).delete()
    return job
