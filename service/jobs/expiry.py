"""Delete expired scans of cohorts and viewers, job files and orphaned files."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from sqlalchemy import select

from service.cohorts import cohorts
from service.cohorts.files import COHORTS, CohortFolder
from service.database import Cohort, Database, Job
from service.errors import CohortInUse, FilesUnavailable
from service.files import Files
from service.jobs.files import JOBS, JobFolder
from service.jobs.states import TERMINAL
from service.settings import Settings
from service.validation import JOB_ID
from service.viewers.scans import sweep

_log = logging.getLogger("locum.service")


def expire(database: Database, settings: Settings) -> None:
    """Delete expired scans and files of jobs, and files without a row in the database."""
    files = settings.open_files()
    _expire_cohorts(database, settings)
    _expire_jobs(database, files)
    with log_and_continue("the scans of viewers"):
        sweep(settings.viewer_scans)
    with log_and_continue("what was left half written"):
        files.sweep(COHORTS)
    for cohort_id, _ in _folders(files, COHORTS):
        with log_and_continue(f"the files of cohort {cohort_id}"):
            _sweep(database, files, cohort_id)


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


def _expire_jobs(database: Database, files: Files) -> None:
    for job_id, changed in _folders(files, JOBS):
        with log_and_continue(f"the files of job {job_id}"):
            _expire_job(database, files, job_id, changed)


def _expire_job(database: Database, files: Files, job_id: str, changed: float) -> None:
    now = datetime.now(UTC)
    with database.read() as session:
        job = session.get(Job, job_id)
    over = job is not None and job.state in TERMINAL
    # A folder without a row belongs to a request that was cut off, or to one that just started.
    due = now.timestamp() - changed > 3600 if job is None else over and job.expires_at < now
    folder = JobFolder(files, job_id)
    if due:
        folder.delete()
        _log.info("the files of job %s are deleted", job_id)
    elif over:
        # The worker deletes them, unless it was killed at that moment.
        folder.delete_unfinished()


def _sweep(database: Database, files: Files, cohort_id: str) -> None:
    with database.write() as session:
        # Locked, so that no scan has its file without its row at this moment.
        session.get(Cohort, cohort_id, with_for_update=True)
        removed = CohortFolder(files, cohort_id).sweep(cohorts.digests(session, cohort_id))
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
    except (OSError, FilesUnavailable) as error:
        _log.warning("%s cannot be deleted: %s", what, type(error).__name__)


def _folders(files: Files, folder: str) -> list[tuple[str, float]]:
    """List the folders of cohorts or jobs with the times of their last changes."""
    with log_and_continue(f"the files of {folder}"):
        return [found for found in files.folders(folder) if re.fullmatch(JOB_ID, found[0])]
    return []
