"""From an accepted request to a worker: the row first, then the message.

The reconciler sends a message again that could not be sent or that Redis lost. So requests are accepted while
Redis is down.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy import update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from service.database import Database, Job
from service.errors import BrokerError
from service.jobs.records import replayed
from service.runtime.queue import RUN_JOB, Queue

_log = logging.getLogger("locum.service")


def fingerprint(request: dict[str, Any]) -> str:
    """64 hexadecimal digits that two requests share only if they ask for the same."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def send(database: Database, queue: Queue, job_id: str) -> bool:
    """Tell the workers of a job; whether Redis took the message. Call it after the commit."""
    try:
        queue.send(RUN_JOB, job_id)
    except BrokerError as error:
        _log.warning("job %s waits for Redis: %s", job_id, error)
        with database.write() as session:
            # The reconciler sends at once what was never sent.
            session.execute(update(Job).where(Job.id == job_id, Job.state == "queued").values(queued_at=None))
        return False
    return True


def create_once(
    database: Database,
    hospital: str,
    key: str | None,
    request_fingerprint: str,
    create: Callable[[Session], Job],
) -> tuple[Job, bool]:
    """Make a job in one transaction, unless this idempotency key made it before: (job, whether it is new).

    Raises:
        IdempotencyConflict: the key made a job of another request.
    """
    try:
        with database.write() as session:
            before = None if key is None else replayed(session, hospital, key, request_fingerprint)
            return (create(session), True) if before is None else (before, False)
    except IntegrityError:
        if key is None:
            raise
        # The same request, sent twice at once: on a database with several writers the other one came first.
        with database.read() as session:
            before = replayed(session, hospital, key, request_fingerprint)
        if before is None:
            raise
        return before, False
