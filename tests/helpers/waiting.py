"""Wait for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil


def wait_for(
    condition: Callable[[], Any],
    process: psutil.Process | None = None,
    *,
    patience_s: float = 60,
    pause_s: float = 0.02,
) -> Any:
    """The first true value of `condition`; the bound only turns a hang into a failure."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came about"
        assert process is None or process.is_running(), "the process ended"
        time.sleep(pause_s)
    return value
