"""Run one job in a worker process, from its claim to its end.

A job ends in a final state, with a reason unless it succeeded; otherwise its lease expires and the reconciler
requeues it. A job that waits for another system returns to the queue by itself.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pkgutil import resolve_name

import torch
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from model_store.errors import LocumStoreError, StoreUnavailable
from personalization.errors import PersonalizationError
from service.database import Database, Job
from service.errors import (
    FilesUnavailable,
    GpuMemoryFull,
    GpuUnusable,
    JobCancelled,
    LeaseLost,
    ServiceError,
)
from service.files import log_and_continue
from service.jobs import records
from service.jobs.leases import claim, finish, postpone
from service.settings import Settings
from service.worker.attempt import Attempt, AttemptOutcome, Postponed
from service.worker.cohort_images import cohort_files
from service.worker.device import check_gpu, device_of, prepare_torch, release, words_of_memory

_log = logging.getLogger("locum.worker")

# Errors with messages for the client of the job.
_IN_WORDS = (LocumStoreError, PersonalizationError, ServiceError)


def run_next(job_id: str, settings: Settings) -> None:
    """Run the next job, by the turns of the hospitals (`records.turns`).

    A message only says that a job waits: a hospital with many jobs must not delay the others. The job of the
    message is tried last, because the worker that held it may have died.

    Raises:
        GpuUnusable: before a claim, or instead of a job's end: this process can run no job.
    """
    # A worker without its GPU must leave the jobs to those that have one.
    check_gpu(settings)
    database = Database(settings.resolved_database_url)
    try:
        with database.read() as session:
            device_class = session.scalar(select(Job.device_class).where(Job.id == job_id))
            candidates = [*records.turns(session, device_class), job_id]
    finally:
        database.dispose()
    for candidate in candidates:
        if run_job(candidate, settings):
            return


def run_job(job_id: str, settings: Settings) -> bool:
    """Claim the job and run it; return whether it was claimed.

    A finished job, or one that another worker holds, is left alone.
    """
    database = Database(settings.resolved_database_url)
    try:
        lease = claim(database, job_id, f"{socket.gethostname()}:{os.getpid()}", settings)
        if lease is None:
            _log.info("job %s cannot be claimed: it is over, or another worker has it", job_id)
            return False
        _log.info("job %s: attempt %d", job_id, lease.attempt)
        with Attempt(database, lease, settings) as attempt:
            _attend(attempt)
        return True
    finally:
        database.dispose()
        release()


def _attend(attempt: Attempt) -> None:
    try:
        state = _end(attempt)
    except LeaseLost as error:
        _log.warning("%s", error)
        return
    if state is None:
        return
    # Without the reason, which describes the hospital's scans: only readers of the job may see it.
    _log.info("job %s: %s", attempt.lease.job_id, state)
    # Only an unfinished job can continue. What cannot be deleted now is deleted by the reconciler.
    with log_and_continue(f"the files of job {attempt.lease.job_id}"):
        attempt.folder.delete_unfinished()


def _end(attempt: Attempt) -> str | None:
    """Work, and record the end; None if the job waits for another system. Raises LeaseLost."""
    try:
        outcome = _outcome(attempt)
    except Postponed as postponed:
        if not postpone(attempt.database, attempt.lease, postponed.until, str(postponed)):
            return "cancelled"
        _log.info("job %s waits: %s", attempt.lease.job_id, postponed)
        return None
    finish(
        attempt.database,
        attempt.lease,
        outcome.state,
        reason=outcome.reason,
        result=outcome.result,
        gate=outcome.gate,
        candidate=outcome.candidate,
        observed=outcome.observed,
    )
    return outcome.state


def _outcome(attempt: Attempt) -> AttemptOutcome:
    try:
        prepare_torch(attempt.settings)
        outcome: AttemptOutcome = resolve_name(attempt.kind.run)(attempt)
        return outcome
    except (LeaseLost, Postponed):
        raise
    except (FilesUnavailable, StoreUnavailable) as error:
        _log.warning("job %s: %s", attempt.lease.job_id, error)
        until = datetime.now(UTC) + timedelta(seconds=attempt.settings.resend_seconds)
        # Without the error's text: it has addresses of the installation.
        raise Postponed("the files or the model store cannot be reached", until) from error
    except JobCancelled as cancelled:
        return AttemptOutcome("cancelled", str(cancelled))
    except SoftTimeLimitExceeded:
        hours = attempt.settings.hard_limit_seconds / 3600
        return AttemptOutcome(
            "failed",
            f"took longer than a job may ({hours:.3g} h) while {attempt.stage}: send fewer scans, or ask for "
            "fewer epochs",
        )
    except (SQLAlchemyError, GpuUnusable):
        # Nothing can be stored or computed now. The lease expires, and the reconciler requeues the job.
        raise
    except (torch.OutOfMemoryError, GpuMemoryFull) as error:
        _log.exception("job %s", attempt.lease.job_id)
        device = device_of(attempt.settings)
        words = words_of_memory(error, _scans(attempt), device) if device.type == "cuda" else str(error)
        return AttemptOutcome("failed", f"while {attempt.stage}: {words}")
    except _IN_WORDS as error:
        return AttemptOutcome("failed", str(error))
    except (MemoryError, OSError) as error:
        _log.exception("job %s", attempt.lease.job_id)
        return AttemptOutcome(
            "failed", f"while {attempt.stage}: {type(error).__name__}: {error}; see the worker's log"
        )
    except Exception as error:
        _log.exception("job %s", attempt.lease.job_id)
        # An error of CUDA stays in its process, and says nothing of the job.
        check_gpu(attempt.settings)
        return AttemptOutcome(
            "failed",
            f"an unexpected {type(error).__name__} while {attempt.stage}; the worker's log has it under job "
            f"{attempt.lease.job_id}",
        )


def _scans(attempt: Attempt) -> int | None:
    """How many scans the job is about; None of one without a cohort."""
    if attempt.job.cohort is None:
        return None
    with suppress(ServiceError):
        return len(cohort_files(attempt))
    return None
