"""The queue from both ends: the API, which only sends names and JSON, and the worker, which has the code.

    API ── send ──> Redis, queue `adaptation` ──> worker, one task at a time

Messages are hints: what was asked and how far it got is in the database. A message that is lost or
delivered twice must therefore do no harm, and every task is written so.
"""

from __future__ import annotations

from celery import Celery
from kombu.exceptions import OperationalError

from service.errors import BrokerError
from service.runtime.broker import Broker
from service.settings import Settings

QUEUE = "adaptation"
VERIFY_STORE = "locum.verify_store"
RUN_JOB = "locum.run_job"

# Before every key, so that the Redis can be shared.
_PREFIX = "locum:"
# Redis hands a message out again when it was not acknowledged for so long: later than any task may still run.
_VISIBILITY_MARGIN_SECONDS = 600
_SEND_SECONDS = 2.0
_SOFT_SHARE = 0.95


def celery_app(settings: Settings, broker_url: str) -> Celery:
    """A Celery that speaks JSON only and loses no task with its worker."""
    app = Celery("locum", broker=broker_url, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        # Results are rows of the database; a second copy in Redis could only contradict them.
        task_ignore_result=True,
        task_default_queue=QUEUE,
        # A task is acknowledged when it has returned; the task of a killed process returns to the queue.
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        # One process per GPU.
        worker_concurrency=1,
        # Told first, so that the job can say why it ended; killed if that does not help.
        task_soft_time_limit=settings.hard_limit_seconds * _SOFT_SHARE,
        task_time_limit=settings.hard_limit_seconds,
        broker_transport_options={
            "visibility_timeout": settings.hard_limit_seconds + _VISIBILITY_MARGIN_SECONDS,
            "global_keyprefix": _PREFIX,
        },
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # Hours of work are not thrown away because Redis blinked; who may finish it is decided in the
        # database.
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        enable_utc=True,
        timezone="UTC",
    )
    return app


class Queue:
    """The sending end."""

    def __init__(self, settings: Settings, broker: Broker) -> None:
        self.broker = broker
        self._celery = celery_app(settings, broker.celery_url)
        # A person waits for the sender: report a Redis that is down or hangs at once, without a retry.
        self._celery.conf.broker_transport_options |= {
            "socket_timeout": _SEND_SECONDS,
            "socket_connect_timeout": _SEND_SECONDS,
            "connect_retries_timeout": _SEND_SECONDS,
            "max_retries": 1,
            "interval_start": 0,
        }
        self._unreachable = self._celery.connection_for_write().recoverable_connection_errors

    def send(self, task: str, *arguments: str | int) -> None:
        """Put a task into the queue.

        Raises:
            BrokerError: Redis does not take it.
        """
        try:
            self._celery.send_task(task, args=arguments, queue=QUEUE, retry=False)
        except (OperationalError, *self._unreachable) as error:
            raise BrokerError(
                f"Redis does not take the task ({type(error).__name__}): ask again when /health/ready says "
                "that it answers"
            ) from error

    def send_once(self, task: str, *, every_seconds: int) -> bool:
        """Put a task into the queue, unless some process did so within the last `every_seconds`."""
        sent = f"{_PREFIX}sent:{task}"
        if not self.broker.client.set(sent, 1, nx=True, ex=every_seconds):
            return False
        try:
            self.send(task)
        except BrokerError:
            self.broker.client.delete(sent)
            raise
        return True

    def waiting(self) -> int:
        """Messages that no worker has taken. Raises RedisError."""
        return int(self.broker.client.llen(_PREFIX + QUEUE))

    def close(self) -> None:
        """Close its connections."""
        self._celery.close()
