"""End a step that computes for too long, wherever in a method it is."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from training.errors import SiteFailed


class _TimeIsUp(BaseException):
    """Raised inside of a step, as KeyboardInterrupt is: no method catches it."""


@contextmanager
def ended_after(minutes: float) -> Iterator[None]:
    """End the block after so many minutes, between two operations. Raises SiteFailed.

    A step is a method's own code, of which nothing else could be asked; it can be killed at any time anyway.
    """
    thread, lock, over = threading.get_ident(), threading.Lock(), threading.Event()

    def interrupt() -> None:
        with lock:
            if not over.is_set():
                _raise_in(thread, _TimeIsUp)

    timer = threading.Timer(minutes * 60, interrupt)
    timer.daemon = True
    try:
        timer.start()
        try:
            yield
        finally:
            with lock:
                over.set()
                # One that was sent, and has not come up yet.
                _raise_in(thread, None)
            timer.cancel()
    except _TimeIsUp:
        raise SiteFailed(
            f"the step took longer than {minutes:g} minutes (`most_minutes_per_round` of the hospital's "
            "policy)"
        ) from None


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
