"""The embedded worker of `python -m service`: a Celery worker process beside the API."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from service.runtime.child_process import Child
from service.settings import Settings

_log = logging.getLogger("locum.service")

_LOOK_SECONDS = 1.0
# A worker that dies at once would otherwise be started in a tight loop. "At once" is after its imports, which
# take seconds on a busy machine.
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_SETTLED_SECONDS = 60.0


class EmbeddedWorker:
    """A worker process that restarts when it dies and stops with this process.

    The first start waits for `ready`: the worker's imports would otherwise take the cores from the API's.
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
        pauses = Pauses()
        while not self._stopping.is_set():
            started = time.monotonic()
            # The log goes to standard error. Celery writes `Warm shutdown` to standard output and has no
            # option against it.
            child = Child(worker_command(), environment=self._environment, silent=True)
            while child.alive and not self._stopping.wait(_LOOK_SECONDS):
                continue
            returncode, pause = child.returncode, pauses.after(time.monotonic() - started)
            child.stop()
            if not self._stopping.is_set():
                _log.warning("the worker ended (%s); starting it again in %.0f s", returncode, pause)
                self._stopping.wait(pause)


class Pauses:
    """Pause before each restart: it doubles while workers die soon."""

    def __init__(self) -> None:
        self._next = _SHORTEST_PAUSE_SECONDS

    def after(self, age_seconds: float) -> float:
        """Return the pause in seconds after a worker that lived for `lived` seconds."""
        if age_seconds >= _SETTLED_SECONDS:
            self._next = _SHORTEST_PAUSE_SECONDS
        pause, self._next = self._next, min(2 * self._next, _LONGEST_PAUSE_SECONDS)
        return pause


def worker_command() -> list[str]:
    """Command line of the worker, without gossip between workers."""
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "WARNING"]
    return [sys.executable, "-m", "service.worker", *quiet]


def worker_environment(settings: Settings) -> dict[str, str]:
    """This process's settings, with those of its command line, as a child's environment."""
    environment = {}
    for name in settings.model_fields_set:
        value = getattr(settings, name)
        secret = getattr(value, "get_secret_value", None)
        if value is not None:
            environment[f"LOCUM_{name.upper()}"] = str(value if secret is None else secret())
    return environment
