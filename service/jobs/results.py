"""The result of a finished job: the mask, or the UIDs of what was stored."""

from __future__ import annotations

from service.database import Database
from service.database.job_states import TERMINAL
from service.errors import JobFilesDeleted, JobMakesNoMask, JobStillRunning, JobWithoutMask
from service.files import Files
from service.job_kinds import KINDS
from service.jobs import records
from service.jobs.files import JobFolder, StoredResult


def read_result(database: Database, files: Files, job_id: str) -> StoredResult:
    """Read the result of a job.

    Raises:
        JobUnknown, JobMakesNoMask, JobStillRunning, JobWithoutMask, JobFilesDeleted.
    """
    with database.read() as session:
        job = records.get(session, job_id)
    if not KINDS[job.kind].answers:
        raise JobMakesNoMask(
            f"Job {job_id} is of kind '{job.kind}': what came of it is its candidate, at /jobs/{job_id}."
        )
    if job.state not in TERMINAL:
        raise JobStillRunning(
            f"job {job_id} is {job.state}: follow /jobs/{job_id}/events, or ask again in a while"
        )
    if job.state not in ("succeeded", "fell_back"):
        raise JobWithoutMask(f"Job {job_id} is {job.state}: {job.reason}.")
    stored = JobFolder(files, job_id).read_result()
    if stored is None:
        raise JobFilesDeleted(f"The files of job {job_id} have expired or were deleted: send the scan again.")
    return stored
