"""Two ways to start a worker or an API: by its command, or forked from a process with all imports made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.harness.forked import Forked
from service.runtime.embedded_worker import worker_command


class Started(Protocol):
    """A started process, which leads a session."""

    @property
    def pid(self) -> int | None:
        """The process id."""

    def poll(self) -> int | None:
        """The exit code, None while it runs."""

    def wait(self) -> object:
        """Wait until it has ended."""


Start = Callable[[Mapping[str, str], Path], Started]


def started(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Started:
    """Start a process with both of its outputs appended to a log."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def by_command(environment: Mapping[str, str], log: Path) -> Started:
    """Start a worker by its command."""
    return started(worker_command(), environment, log)


def forked(environment: Mapping[str, str], log: Path) -> Started:
    """Fork a worker from a process that has imported every module it needs."""
    return Forked("service.worker", worker_command()[3:], log, environment)


def api_by_command(environment: Mapping[str, str], log: Path) -> Started:
    """Start an API by its command."""
    return started([sys.executable, "-m", "service"], environment, log)


def forked_api(environment: Mapping[str, str], log: Path) -> Started:
    """Fork an API from a process that has imported every module it needs."""
    return Forked("service", [], log, environment)


def left_of(begun: Sequence[Started], state_dir: Path, socket: str) -> list[psutil.Process]:
    """Running processes of these sessions, or with this state folder, or the Redis on this socket."""
    mine = ("LOCUM_STATE_DIR", str(state_dir))
    sessions = {child.pid for child in begun}
    found = []
    for process in psutil.process_iter():
        try:
            # A forked worker shows the environment of the process it was forked from. Redis overwrites its
            # environment and its command line with the address where it listens.
            if (
                session_of(process) in sessions
                or mine in process.environ().items()
                or socket in " ".join(process.cmdline())
            ) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def session_of(process: psutil.Process) -> int | None:
    """The pid of the session's leader; None when the process has ended."""
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None
