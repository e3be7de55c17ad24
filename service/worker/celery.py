"""Celery app of the worker process, which imports torch: `celery -A service.worker worker`.

A worker runs one task at a time from the queue `adaptation`, and from that of its device class. After SIGTERM
it finishes its task and stops. If it is killed, its unacknowledged message goes to the next worker.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from celery.exceptions import CPendingDeprecationWarning, SecurityWarning
from celery.signals import celeryd_init, setup_logging, worker_init, worker_ready, worker_shutdown

from service.database import Database, upgrade
from service.errors import GpuUnusable
from service.inference.providers import cuda_device_seen
from service.jobs.presence import Beating
from service.pacs.configuration import load_servers
from service.runtime import logs
from service.runtime.broker import Broker
from service.runtime.queue import QUEUE, RUN_JOB, VERIFY_STORE, celery_app, queue_of
from service.runtime.store_check import verify_store
from service.settings import settings_or_exit

_log = logging.getLogger("locum.worker")
# Task processes are forked from it later.
_worker_process = os.getpid()
# The first use of CUDA may compile kernels for a new card.
_CHECK_SECONDS = 300

settings = settings_or_exit({"pacs": load_servers})
broker = Broker(settings)
worker = celery_app(settings, broker.celery_url)


def _before_checks(**_: object) -> None:
    # On many lines, Celery warns of root, of pickle, and names an option that this command does not have.
    # Messages here are JSON; `_configure_logging` says the rest.
    warnings.simplefilter("ignore", SecurityWarning)


def _configure_logging(**_: object) -> None:
    # A receiver of this signal keeps Celery from configuring logging itself.
    logs.configure(settings, whole_process=True)
    # Celery advises to cancel running tasks when the connection to Redis is lost. `service.runtime.queue`
    # says why that is not done.
    warnings.simplefilter("ignore", CPendingDeprecationWarning)
    if os.geteuid() == 0:
        _log.warning(
            "the worker runs as root: a flaw in a reader of scans could reach the whole machine; start Locum "
            "as a user of its own"
        )


def _prepare(**_: object) -> None:
    beating.device_class = check_device()
    worker.amqp.queues.select([QUEUE, queue_of(beating.device_class)])
    broker.start()
    with _database() as database:
        upgrade(database)


def _appear(**_: object) -> None:
    # Its thread begins after the fork of the task process. A worker that is stopped before that has none.
    beating.__enter__()
    worker_shutdown.connect(_disappear)


def _disappear(**_: object) -> None:
    beating.__exit__()


def _finish(**_: object) -> None:
    broker.stop()


@contextmanager
def _database() -> Iterator[Database]:
    # Opened per task: an engine must not be shared across the fork between the worker and its task process.
    database = Database(settings.resolved_database_url)
    try:
        yield database
    finally:
        database.dispose()


beating = Beating(_database, f"{socket.gethostname()}:{os.getpid()}")


def verify() -> None:
    """Verify the digest of every artefact in the store, and record the result."""
    with _database() as database:
        verdict = verify_store(settings.open_store(), database)
    for reference, wrong in verdict.damaged.items():
        _log.error("%s is damaged: %s", reference, wrong)
    _log.info("verified %d versions, %d damaged", verdict.versions, len(verdict.damaged))


def run(job_id: str) -> None:
    """Run the next job; a message says that one waits, and names it.

    A task process that cannot use its GPU ends the worker. Its manager starts it again, and the check at the
    start says whether a new process can. Waiting jobs stay for other workers; messages are sent again.
    """
    # Imports torch into the task process, only once there is a job.
    from service.worker.runner import run_next

    try:
        run_next(job_id, settings)
    except GpuUnusable as error:
        _log.critical("this worker ends and takes no job: %s", error)
        end_worker()


def end_worker() -> None:
    """Stop the worker when its present task has returned."""
    os.kill(_worker_process, signal.SIGTERM)


def check_device() -> str:
    """Refuse to start, with the reason, where jobs cannot have their GPU; say what they have.

    Returns the device class: `cpu` or `cuda`. Raises SystemExit.
    """
    if settings.device in ("cpu", "openvino") or (settings.device == "auto" and not cuda_device_seen()):
        return "cpu"
    # A process of its own: after a use of CUDA, no task process could be forked.
    command = [sys.executable, "-m", "service.worker.device"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the check of the device ended with {done.returncode}"]
        raise SystemExit(f"locum: {lines[-1]}")
    _log.info("jobs run on %s", done.stdout.strip(), extra={"part": "device"})
    return str(json.loads(done.stdout.splitlines()[-1])["device"]).partition(":")[0]


# Called, not used as decorators: Celery is untyped, and its decorators hide the types of a function.
celeryd_init.connect(_before_checks)
setup_logging.connect(_configure_logging)
worker_init.connect(_prepare)
worker_ready.connect(_appear)
worker_shutdown.connect(_finish)
worker.task(name=VERIFY_STORE)(verify)
worker.task(name=RUN_JOB)(run)
