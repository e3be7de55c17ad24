"""Deadlines of runs and loads: one thread of the process calls what is due, and sleeps otherwise.

A `threading.Timer` starts a thread for each deadline, which costs as much as the run of a small network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Deadlines:
    """Calls to make unless their blocks end first. Safe from any thread, and after a fork."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[object, tuple[float, Callable[[], object]]] = {}
        self._thread: threading.Thread | None = None
        # When the thread looks next; infinite while it waits to be woken.
        self._looks_at = float("inf")

    @contextmanager
    def within(self, seconds: float, call: Callable[[], object]) -> Iterator[None]:
        """Call `call` in another thread if the block takes longer. It must return quickly and raise nothing.

        It may still be called when the block ends at that moment.
        """
        key, at = object(), time.monotonic() + seconds
        with self._changed:
            self._due[key] = at, call
            if self._thread is None or not self._thread.is_alive():
                self._looks_at = at
                self._thread = threading.Thread(target=self._watch, name="deadlines", daemon=True)
                self._thread.start()
            elif at < self._looks_at:
                self._looks_at = at
                self._changed.notify()
        try:
            yield
        finally:
            # The thread is not woken: it looks again when the earliest deadline that it knew has come.
            with self._changed:
                self._due.pop(key, None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._looks_at = min((at for at, _ in self._due.values()), default=float("inf"))
                wait = self._looks_at - time.monotonic()
                if wait > 0:
                    self._changed.wait(min(wait, threading.TIMEOUT_MAX))
                now = time.monotonic()
                late = [key for key, (at, _) in self._due.items() if at <= now]
                calls = [self._due.pop(key)[1] for key in late]
            for call in calls:
                call()


DEADLINES = Deadlines()
