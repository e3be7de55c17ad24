"""Jobs on one scan: keep the scan, create the job, wait for its end.

A job of kind `scan` adapts a model to the scan, one of kind `segment` runs a chosen network on it. The scan
is deleted when its job ends; the result is kept until it expires.
"""

from __future__ import annotations

import asyncio
import errno

from anyio import to_thread
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.requests import ClientDisconnect, Request

from model_store.artefact import Artefact
from model_store.scan import deidentify
from service.cohorts.intake import uid_key
from service.context import ServiceContext
from service.database import Job, in_turn
from service.database.hospitals import share_of
from service.database.job_states import TERMINAL
from service.errors import DiskFull, ScanQuotaExceeded
from service.job_kinds import JobKind
from service.jobs import records, submission
from service.jobs.files import JobFolder, StoredScan
from service.jobs.records import Asked, Work
from service.prediction.options import SegmentOptions
from service.prediction.output import DICOM_OUTPUTS
from service.settings import Settings, cohort_limits

# Short compared with a job, and long enough that polling costs nothing.
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.05, 0.5


def kept_of(data: bytes, options: SegmentOptions, settings: Settings) -> bytes:
    """The bytes that a job keeps of a scan that was read: without the patient, unless its answer repeats the
    patient. Blocking.
    """
    if options.output in DICOM_OUTPUTS:
        return data
    # Whatever its task reads, a cohort reads too.
    return deidentify(data, cohort_limits(settings), uid_key(settings))


def create(
    context: ServiceContext,
    kind: JobKind,
    options: SegmentOptions,
    artefact: Artefact,
    scan: StoredScan,
    request_id: str,
) -> str:
    """Create a durable job, send it on and return its id. Blocking.

    `artefact` is the version that is adapted, or that answers.

    Raises:
        QueueFull, ScanQuotaExceeded, DiskFull.
    """
    work = Work(
        kind=kind,
        hospital=options.hospital,
        model=artefact.name,
        parent=artefact.digest,
        # The scan is the chosen series. Its UID is in a file of the job, which is deleted with the scan.
        options=options.model_dump(mode="json", exclude={"series"}),
    )
    job_id = records.new_id()
    folder = JobFolder(context.settings.open_files(), job_id)
    try:
        # The file comes before the row, because a job without its scan cannot run.
        folder.write_input(scan)
        with context.database.write() as session:
            _check_room(session, context.settings, options.hospital, len(scan.content))
            records.create(
                session,
                context.settings,
                work,
                Asked(request_id),
                job_id=job_id,
                input_bytes=len(scan.content),
            )
    except OSError as error:
        folder.delete()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull("The service's disk is full; send the scan later.") from error
    except BaseException:
        folder.delete()
        raise
    submission.send(context.database, context.queue, job_id)
    return job_id


async def wait_for(request: Request, context: ServiceContext, job_id: str, seconds: float) -> Job:
    """Wait until the job ends or `seconds` have passed, without blocking the event loop.

    Raises:
        ClientDisconnect: the client disconnected. No other client knows the job, so it is cancelled.
    """
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + seconds, _FIRST_LOOK_SECONDS
    while True:
        job = await to_thread.run_sync(_look, context, job_id)
        left = deadline - loop.time()
        if job.state in TERMINAL or left <= 0:
            return job
        if await request.is_disconnected():
            await to_thread.run_sync(submission.cancel, context.database, context.settings, job_id)
            raise ClientDisconnect
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _LOOK_SECONDS)


def _check_room(session: Session, settings: Settings, hospital: str | None, size: int) -> None:
    """Raise ScanQuotaExceeded if `size` more bytes exceed the quota of waiting scans: that of cohorts.

    The share of a hospital, or of a caller without one, is bounded too, see `share_of`.
    """
    in_turn(session, records.QUEUE)
    total = select(func.coalesce(func.sum(Job.input_bytes), 0)).where(Job.state.not_in(TERMINAL))
    waiting = int(session.scalar(total) or 0)
    own = int(session.scalar(total.where(records.of_owner(session, hospital))) or 0)
    quota = settings.cohort_quota_bytes
    share = share_of(session, quota)
    scans = f"scans of {'yours' if hospital is None else f'hospital {hospital!r}'} that wait for a worker"
    if size > share:
        detail = (
            f"The scan has {size} bytes, expected at most {share}, the limit of the {scans}: send a smaller "
            "one, or let the operator raise LOCUM_COHORT_QUOTA_BYTES."
        )
    elif own + size > share:
        detail = (
            f"The {scans} have {own} bytes; with {size} more they exceed their limit of {share} "
            "(LOCUM_COHORT_QUOTA_BYTES): send the scan again when GET /jobs?state=queued lists fewer jobs."
        )
    elif waiting + size > quota:
        detail = (
            f"The scans that wait for a worker may have {quota} bytes (LOCUM_COHORT_QUOTA_BYTES), expected "
            f"{size} of them free, found fewer: send the scan again later."
        )
    else:
        return
    raise ScanQuotaExceeded(detail)


def _look(context: ServiceContext, job_id: str) -> Job:
    with context.database.read() as session:
        return records.get(session, job_id)
