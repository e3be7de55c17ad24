"""End what a run of the tests started and left running, however the run ended.

`watch()` starts a process that waits for the end of this one, which may be SIGKILL: then no fixture cleans
up. It ends all that was started here: the processes with this run in their environment (PostgreSQL has made
itself a daemon), the forked ones (they show the environment of an earlier time), and the descendants and
process groups of both.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterable
from contextlib import suppress

import psutil

# A process of pytest-xdist belongs to its controller's run, too.
_RUNS = "PYTEST_RUNS"
_GRACE_S = 2.0


def watch() -> None:
    """Have all that this process starts from now on ended with it."""
    run = uuid.uuid4().hex
    read, write = os.pipe()
    # In a session of its own, so that a signal to this process's group does not reach it.
    command = [sys.executable, __file__, run, str(os.getpgrp())]
    os.posix_spawn(
        sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)], setsid=True
    )
    os.close(read)
    os.environ[_RUNS] = f"{os.environ.get(_RUNS, '')}:{run}"
    here = os.getpid()

    def note_fork() -> None:
        if os.getppid() == here:
            os.write(write, b"%d\n" % os.getpid())
            # Only this process may hold the pipe: its end is this process's own.
            os.close(write)

    os.register_at_fork(after_in_child=note_fork)


def _left(run: str, group: int, forked: Iterable[psutil.Process]) -> set[psutil.Process]:
    """The running processes of a run, which itself is in the process group `group`."""
    there = {process for process in psutil.process_iter() if process.pid != os.getpid()}
    found, groups = set(), set()
    for process in there:
        # Those that have ended, and other people's.
        with suppress(psutil.Error, OSError):
            if process in forked or run in process.environ().get(_RUNS, ""):
                found.update([process, *process.children(recursive=True)])
                groups.add(os.getpgid(process.pid))
    # Redis overwrites its environment, but not the shell that watches it in its group.
    for process in there - found:
        with suppress(OSError):
            if os.getpgid(process.pid) in groups - {group}:
                found.add(process)
    return {process for process in found if process.is_running()}


def _reap(run: str, group: int, forked: Iterable[psutil.Process]) -> None:
    for process in (left := _left(run, group, forked)):
        with suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(left, timeout=_GRACE_S)
    while left := _left(run, group, forked):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)


def _noted() -> set[psutil.Process]:
    """Wait for the run's end; return the processes that it had forked."""
    forked = set()
    for line in sys.stdin:
        with suppress(psutil.Error):
            forked.add(psutil.Process(int(line)))
    return forked


if __name__ == "__main__":
    _reap(sys.argv[1], int(sys.argv[2]), _noted())
