"""`python -m service`: everything in one command, the API in this process and a worker beside it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from service.children import Child
from service.settings import Settings

_log = logging.getLogger("locum.service")

_LOOK_SECONDS = 1.0
# A worker that dies at once would otherwise be started in a tight loop.
_LONGEST_PAUSE_SECONDS = 60.0


class EmbeddedWorker:
    """A worker process that is started again when it dies, and stopped with this one.

    `ready` is asked before the first start: the worker's imports would else take the cores from the API's.
    """

    def __init__(self, settings: Settings, ready: Callable[[], bool]) -> None:
        self._environment = os.environ | worker_environment(settings)
        self._ready = ready
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="embedded-worker", daemon=True)

    def __enter__(self) -> EmbeddedWorker:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ready():
            if self._stopping.wait(0.05):
                return
        pause = _LOOK_SECONDS
        while not self._stopping.is_set():
            child = Child(worker_command(), environment=self._environment)
            while child.alive and not self._stopping.wait(_LOOK_SECONDS):
                pause = _LOOK_SECONDS
            returncode = child.returncode
            child.stop()
            if not self._stopping.is_set():
                _log.warning("the worker ended (%s); starting it again in %.0f s", returncode, pause)
                self._stopping.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def worker_command() -> list[str]:
    """The worker as anybody would start it, without the chatter between many workers."""
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "WARNING"]
    return [sys.executable, "-m", "celery", "--quiet", "-A", "service.worker", "worker", *quiet]


def worker_environment(settings: Settings) -> dict[str, str]:
    """This process's settings, those from its command line too, as a child's environment."""
    environment = {}
    for name in settings.model_fields_set:
        value = getattr(settings, name)
        secret = getattr(value, "get_secret_value", None)
        if value is not None:
            environment[f"LOCUM_{name.upper()}"] = str(value if secret is None else secret())
    return environment
