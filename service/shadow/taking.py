"""Take scans for the shadow once their answers were sent: the caller neither waits for it nor sees it."""

from __future__ import annotations

import hashlib
import threading
import time

from pydantic import BaseModel, ConfigDict
from sqlalchemy import func, select

from model_store.scan import deidentify
from service.cohorts.intake import uid_key
from service.database import Database, Job, Shadow
from service.files import log_and_continue
from service.job_kinds import shadow as shadow_job
from service.jobs import records, submission
from service.jobs.files import JobFolder, StoredScan
from service.jobs.records import Asked, Work
from service.runtime.queue import Queue
from service.settings import Settings, cohort_limits

# How soon another process learns that a shadow began or ended.
_LOOK_SECONDS = 5.0
# Jobs that wait: the scans of a shadow are dropped before a hospital's own jobs wait for them.
_MOST_WAITING = 20


class ShadowOptions(BaseModel):
    """The options of a job that lets the second version answer: which, and how the first one answered."""

    model_config = ConfigDict(extra="forbid")

    shadow: int
    request: str
    version: str
    choice: dict[str, str | None]


class Shadows:
    """Which answers are taken, for the process: a look-up in memory, renewed every few seconds."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._active: dict[tuple[str, str], tuple[int, int]] = {}

    def taken(self, hospital: str | None, model: str, request: str) -> int | None:
        """The number of the shadow that answers the scan of a request, too; None of other scans."""
        if hospital is None:
            return None
        with self._lock:
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                self._look()
        number, every = self._active.get((hospital, model), (None, 1))
        drawn = int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest())
        return number if drawn % every == 0 else None

    def forget(self) -> None:
        """Look again at the next answer."""
        self._looked = float("-inf")

    def _look(self) -> None:
        with log_and_continue("the shadows"), self._database.read() as session:
            rows = session.scalars(select(Shadow).where(Shadow.ended.is_(None)))
            self._active = {(row.hospital, row.model): (row.id, row.every) for row in rows}
        self._looked = time.monotonic()


def keep(
    database: Database,
    settings: Settings,
    queue: Queue,
    hospital: str,
    model: str,
    data: bytes,
    scan: tuple[str, int],
    asked: ShadowOptions,
) -> None:
    """Let a worker answer a scan by the second version, unless many such scans wait already. Blocking.

    `scan` are the digest and the size of the received bytes. Errors are logged: the answer was sent.
    """
    with log_and_continue("a scan for the shadow"):
        with database.read() as session:
            waiting = (
                select(func.count())
                .select_from(Job)
                .filter_by(kind=shadow_job.KIND.name, state="queued", hospital=hospital)
            )
            if (session.scalar(waiting) or 0) >= _MOST_WAITING:
                return
        content = deidentify(data, cohort_limits(settings), uid_key(settings))
        job, options = records.new_id(), asked.model_dump(mode="json")
        folder = JobFolder(settings.open_files(), job)
        try:
            folder.write_input(StoredScan(content, *scan))
            with database.write() as session:
                work = Work(kind=shadow_job.KIND, hospital=hospital, model=model, options=options)
                records.create(
                    session, settings, work, Asked(asked.request), job_id=job, input_bytes=len(content)
                )
        except BaseException:
            folder.delete()
            raise
        submission.send(database, queue, job)
