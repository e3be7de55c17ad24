"""Delete expired scans of cohorts and viewers, kept answers, observations, messages, files of jobs, orphans.

A folder without a row may be another database's: of a service with the wrong LOCUM_DATABASE_URL or
LOCUM_FILES, or beside a database that was restored from an older backup. So a cohort's folder without a row
is kept, and that of a job or of a viewer's scan until its files would have expired.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from sqlalchemy import select

from service import corrections, observation, shadow
from service.cohorts import cohorts
from service.cohorts.files import COHORTS, CohortFolder
from service.corrections import kept_answers
from service.database import Cohort, Database, Job
from service.database.job_states import TERMINAL
from service.errors import CohortInUse
from service.files import Files, log_and_continue
from service.jobs.files import JOBS, JobFolder
from service.runtime.reserve import make_room
from service.settings import Settings
from service.validation import JOB_ID
from service.viewers.scans import sweep
from service.watch import messages

_log = logging.getLogger("locum.service")

# A request that has just started writes its files before its row.
_SHORTEST_SECONDS = 3600.0
# Folders of cohorts without a row that this process has warned of.
_unknown: set[str] = set()


def expire(database: Database, settings: Settings) -> None:
    """Delete expired scans and files of jobs, and files without a row in a cohort of the database."""
    files = settings.open_files()
    _expire_observations(database, settings)
    _expire_messages(database)
    kept_answers.trim_all(database, settings)
    _expire_cohorts(database, settings)
    _expire_jobs(database, settings, files)
    sweep(database, settings)
    with log_and_continue("what was left half written"):
        files.sweep(COHORTS)
    for cohort_id, _ in _folders(files, COHORTS):
        with log_and_continue(f"the files of cohort {cohort_id}"):
            _sweep(database, files, cohort_id)


def _expire_observations(database: Database, settings: Settings) -> None:
    before = datetime.now(UTC) - timedelta(days=settings.observation_days)
    going = True
    while going:
        with database.write() as session:
            going = observation.delete_before(session, before) > 0
    going = True
    while going:
        with database.write() as session:
            going = corrections.delete_before(session, before) + shadow.delete_before(session, before) > 0


def _expire_messages(database: Database) -> None:
    with database.write() as session:
        late = messages.give_up(session)
    if late:
        _log.warning("%d messages on alarms were not received in %d days", late, messages.KEPT.days)


def _expire_cohorts(database: Database, settings: Settings) -> None:
    due = select(Cohort.hospital, Cohort.id).where(
        Cohort.deleted_at.is_(None), Cohort.expires_at < datetime.now(UTC)
    )
    with database.read() as session:
        found = [(row.hospital, row.id) for row in session.execute(due)]
    if found:
        make_room(settings)
    for hospital, cohort_id in found:
        # A job still needs the scans; they are deleted after it.
        with suppress(CohortInUse), log_and_continue(f"the scans of cohort {cohort_id}"):
            cohorts.remove(database, settings, hospital, cohort_id)
            _log.info("cohort %s has expired; its scans are deleted", cohort_id)


def _expire_jobs(database: Database, settings: Settings, files: Files) -> None:
    lifetime = max(settings.job_files_lifetime_days * 86400, _SHORTEST_SECONDS)
    for job_id, changed in _folders(files, JOBS):
        with log_and_continue(f"the files of job {job_id}"):
            _expire_job(database, files, job_id, changed + lifetime)


def _expire_job(database: Database, files: Files, job_id: str, orphan_expires: float) -> None:
    now = datetime.now(UTC)
    with database.read() as session:
        job = session.get(Job, job_id)
    over = job is not None and job.state in TERMINAL
    # A folder without a row belongs to a request that was cut off, or to another database's job.
    due = orphan_expires < now.timestamp() if job is None else over and job.expires_at < now
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
        cohort = session.get(Cohort, cohort_id, with_for_update=True)
        if cohort is None:
            _warn_of_unknown(files, cohort_id)
            return
        removed = CohortFolder(files, cohort_id).sweep(cohorts.digests(session, cohort_id))
    if removed:
        _log.warning("%d files of cohort %s belonged to no scan and are deleted", removed, cohort_id)


def _warn_of_unknown(files: Files, cohort_id: str) -> None:
    """Warn once of a cohort that this database never had: rows come before files, and are never deleted."""
    if cohort_id not in _unknown:
        _unknown.add(cohort_id)
        _log.warning(
            "%s/%s/%s: expected a cohort of this database, found none, so the files are kept: compare "
            "LOCUM_DATABASE_URL and LOCUM_FILES with those of the service that wrote them",
            files.location,
            COHORTS,
            cohort_id,
        )


def _folders(files: Files, folder: str) -> list[tuple[str, float]]:
    """List the folders of cohorts or jobs with the times of their last changes."""
    with log_and_continue(f"the files of {folder}"):
        return [found for found in files.folders(folder) if re.fullmatch(JOB_ID, found[0])]
    return []
