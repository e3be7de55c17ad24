"""The Celery queue: the API sends task names and JSON, the worker has the code.

    API ── send ──> Redis, queue `adaptation` ──> worker, one task at a time
                    `adaptation.cpu`, `.cuda` ──> workers on that device

Messages are hints: request and progress are in the database. Every task tolerates a message that is lost or
delivered twice.
"""

from __future__ import annotations

from celery import Celery
from kombu.exceptions import OperationalError

from service.errors import BrokerError
from service.runtime.broker import Broker
from service.settings import Settings

QUEUE = "adaptation"
DEVICE_CLASSES = ("cpu", "cuda")
VERIFY_STORE = "locum.verify_store"
RUN_JOB = "locum.run_job"

# Before every key, so that the Redis can be shared.
_PREFIX = "locum:"
# Redis redelivers a message that was not acknowledged for this long: longer than any task may run.
_VISIBILITY_MARGIN_SECONDS = 600
_SEND_SECONDS = 2.0
_SOFT_SHARE = 0.95


def queue_of(device_class: str | None) -> str:
    """The queue of the messages for workers of a device class; of None, for any."""
    return QUEUE if device_class is None else f"{QUEUE}.{device_class}"


def celery_app(settings: Settings, broker_url: str) -> Celery:
    """Build a Celery app that uses JSON only and returns the task of a dead worker to the queue."""
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
        # A soft limit first, so that the job can record its reason; then the hard one.
        task_soft_time_limit=settings.hard_limit_seconds * _SOFT_SHARE,
        task_time_limit=settings.hard_limit_seconds,
        broker_transport_options={
            "visibility_timeout": settings.hard_limit_seconds + _VISIBILITY_MARGIN_SECONDS,
            "global_keyprefix": _PREFIX,
        },
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # A short outage of Redis must not discard hours of work; the database decides who may finish it.
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        enable_utc=True,
        timezone="UTC",
    )
    return app


class Queue:
    """The API's side: sends tasks."""

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

    def send(self, task: str, *arguments: str | int, device_class: str | None = None) -> None:
        """Send a task, to the workers of a device class or to any.

        Raises:
            BrokerError: Redis does not accept it.
        """
        try:
            self._celery.send_task(task, args=arguments, queue=queue_of(device_class), retry=False)
        except (OperationalError, *self._unreachable) as error:
            raise BrokerError(
                f"Redis does not take the task ({type(error).__name__}): ask again when /health/ready says "
                "that it answers"
            ) from error

    def send_once(self, task: str, *, every_seconds: int) -> bool:
        """Send a task, unless a process did so within the last `every_seconds`."""
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
        """Number of messages that no worker has taken. Raises RedisError."""
        queues = map(queue_of, (None, *DEVICE_CLASSES))
        return sum(int(self.broker.client.llen(_PREFIX + queue)) for queue in queues)

    def close(self) -> None:
        """Close its connections."""
        self._celery.close()
