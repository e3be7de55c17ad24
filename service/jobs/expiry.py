"""Delete expired scans of cohorts and viewers, job files and orphaned files."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import select

from service.cohorts import cohorts
from service.cohorts.files import CohortFolder, sweep_aside
from service.database import Cohort, Database, Job
from service.errors import CohortInUse
from service.jobs.files import JobFolder
from service.jobs.states import TERMINAL
from service.settings import Settings
from service.validation import JOB_ID
from service.viewers.scans import sweep

_log = logging.getLogger("locum.service")


def expire(database: Database, settings: Settings) -> None:
    """Delete expired scans and files of jobs, and files without a row in the database."""
    _expire_cohorts(database, settings)
    _expire_jobs(database, settings)
    with log_and_continue("the scans of viewers"):
        sweep(settings.viewer_scans)
    with log_and_continue("what was left half written"):
        sweep_aside(settings.cohorts)
    for folder in _folders(settings.cohorts):
        with log_and_continue(f"the files of cohort {folder.name}"):
            _sweep(database, settings, folder.name)


def _expire_cohorts(database: Database, settings: Settings) -> None:
    due = select(Cohort.hospital, Cohort.id).where(
        Cohort.deleted_at.is_(None), Cohort.expires_at < datetime.now(UTC)
    )
    with database.read() as session:
        found = [(row.hospital, row.id) for row in session.execute(due)]
    for hospital, cohort_id in found:
        # A job still needs the scans; they are deleted after it.
        with suppress(CohortInUse), log_and_continue(f"the scans of cohort {cohort_id}"):
            cohorts.remove(database, settings, hospital, cohort_id)
            _log.info("cohort %s has expired; its scans are deleted", cohort_id)


def _expire_jobs(database: Database, settings: Settings) -> None:
    for folder in _folders(settings.jobs):
        with log_and_continue(f"the files of job {folder.name}"):
            _expire_job(database, settings, folder)


def _expire_job(database: Database, settings: Settings, folder: Path) -> None:
    now = datetime.now(UTC)
    with database.read() as session:
        job = session.get(Job, folder.name)
    # A folder without a row belongs to a request that was cut off, or to one that just started.
    if job is None:
        due = now.timestamp() - folder.stat().st_mtime > 3600
    else:
        due = job.state in TERMINAL and job.expires_at < now
    files = JobFolder(settings.state_dir, folder.name)
    if due:
        files.delete()
        _log.info("the files of job %s are deleted", folder.name)
    elif job is not None and job.state in TERMINAL:
        # The worker deletes them, unless it was killed at that moment.
        files.delete_unfinished()


def _sweep(database: Database, settings: Settings, cohort_id: str) -> None:
    with database.write() as session:
        # Locked, so that no scan has its file without its row at this moment.
        session.get(Cohort, cohort_id, with_for_update=True)
        removed = CohortFolder(settings.cohorts, cohort_id).sweep(cohorts.digests(session, cohort_id))
    if removed:
        _log.warning("%d files of cohort %s belonged to no scan and are deleted", removed, cohort_id)


@contextmanager
def log_and_continue(what: str) -> Iterator[None]:
    """Log what cannot be deleted now and continue; the next pass retries."""
    try:
        yield
    except FileNotFoundError:
        # Another process deleted it meanwhile.
        return
    except OSError as error:
        _log.warning("%s cannot be deleted: %s", what, type(error).__name__)


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return [path for path in root.iterdir() if path.is_dir() and re.fullmatch(JOB_ID, path.name)]
