"""Presence of workers: each says every few seconds that it runs, so that a missing one is seen.

    with Beating(open_database, name):   in a worker's main process, beside its tasks
    presence(session)                    how many run, how many went silent, and since when

Leases (`service.jobs.leases`) say whether a job's worker is there; this says whether a waiting job has one to
wait for. Times are by the database's clock.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType

from sqlalchemy import delete, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.database import Database, Worker, database_now

BEAT_SECONDS = 5.0
SILENT_SECONDS = 30.0
"""A worker that was not heard of for so long may have died, or its machine may be away."""

# A worker that was killed leaves its row; so long it is worth a word.
_FORGOTTEN = timedelta(days=1)
_log = logging.getLogger("locum.worker")

# A process that is forked within a beat would take its database for open and locked, and find it so for ever.
_beating = threading.Lock()
os.register_at_fork(
    before=_beating.acquire, after_in_parent=_beating.release, after_in_child=_beating.release
)


@dataclass(frozen=True)
class Presence:
    """Numbers of workers that run and of those that went silent, and when the last one was seen."""

    running: int
    silent: int
    last_seen: datetime | None
    device_class: str | None = None

    @property
    def absence(self) -> str | None:
        """Say why no worker takes a job; None where one runs."""
        if self.running:
            return None
        which = {None: "no worker", "cpu": "no worker on the CPU", "cuda": "no worker with a GPU"}[
            self.device_class
        ]
        if self.last_seen is None:
            device = f" with LOCUM_DEVICE={self.device_class}" if self.device_class else ""
            return (
                f"{which} is running yet: wait a few seconds where the service starts one, else start one "
                f"(`celery -A service.worker worker`){device}; jobs wait for it"
            )
        return (
            f"{which} was seen since {self.last_seen:%Y-%m-%d %H:%M:%S} UTC: look whether it still runs, "
            "and start it again; jobs wait for it"
        )


def presence(session: Session, device_class: str | None = None) -> Presence:
    """Count the workers; with `device_class`, those of which the jobs compute there."""
    alive_after = database_now(session) - timedelta(seconds=SILENT_SECONDS)
    query = select(Worker.seen_at)
    if device_class is not None:
        query = query.where(Worker.device_class == device_class)
    seen = list(session.scalars(query))
    running = sum(each > alive_after for each in seen)
    return Presence(running, len(seen) - running, max(seen, default=None), device_class)


class Beating:
    """Record every few seconds that this worker runs, until the block ends; its row is deleted then.

    `device_class`, which is set before the block, says where the worker's jobs compute.
    `open_database` opens a connection for each beat. The process forks between beats, also later, when Celery
    replaces a task process that died: a fork waits for the end of a beat.
    """

    def __init__(self, open_database: Callable[[], AbstractContextManager[Database]], name: str) -> None:
        self._open = open_database
        self._name = name
        self.device_class: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="presence", daemon=True)

    def __enter__(self) -> Beating:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self._record(runs=False)

    def _beat(self) -> None:
        while True:
            self._record(runs=True)
            if self._stopping.wait(BEAT_SECONDS):
                return

    def _record(self, *, runs: bool) -> None:
        try:
            with _beating, self._open() as database, database.write() as session:
                record(session, self._name, runs=runs, device_class=self.device_class)
        except SQLAlchemyError as error:
            # Without its database a worker takes no job either; it is silent until the database is back.
            _log.warning("presence is not recorded: %s", type(error).__name__)


def record(session: Session, name: str, *, runs: bool, device_class: str | None = None) -> None:
    """Record that a worker runs, or that it ended; forget those that were silent for a day."""
    now = database_now(session)
    session.execute(delete(Worker).where(Worker.seen_at < now - _FORGOTTEN))
    found = session.get(Worker, name)
    if not runs:
        if found is not None:
            session.delete(found)
    elif found is None:
        session.add(Worker(name=name, started_at=now, seen_at=now, device_class=device_class))
    else:
        found.seen_at = now
