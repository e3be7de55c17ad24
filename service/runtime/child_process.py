"""Child processes that never outlive this process, even when it is killed with -9.

The child has a session of its own, so that Ctrl-C in a terminal reaches this process alone, which then stops
its children in order. A small shell beside it reads from a pipe; only this process holds the other end. When
this process is gone, the shell reads the end of file and stops the child. On Linux the kernel sends SIGTERM
too (PR_SET_PDEATHSIG, by util-linux's setpriv), so that the child ends although its shell was killed before.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO

# Standard input is the pipe; $0 is the grace in tenths of a second, the rest the child's command. The
# watcher keeps nothing else open: neither a lock that the child was handed, nor an output that somebody
# reads to its end.
_WATCHED = """
exec 3<&0 < /dev/null
(
    read -r _ <&3
    kill -TERM $$
    n=$0
    while kill -0 $$ && [ $n -gt 0 ]; do sleep 0.1; n=$((n - 1)); done
    kill -KILL 0
) > /dev/null 2>&1 &
exec "$@" 3<&-
"""


def _new_starter() -> None:
    global _starter
    # The kernel's signal comes when the thread that started the child ends: this one lasts to the end.
    _starter = ThreadPoolExecutor(1, thread_name_prefix="children")


_starter: ThreadPoolExecutor
_new_starter()
os.register_at_fork(after_in_child=_new_starter)


class Child:
    """A running child process and its watcher; both are one process group."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: int | IO[bytes] | None = None,
        silent: bool = False,
        grace_seconds: float = 5.0,
    ) -> None:
        """Start it.

        Args:
            command: program and arguments.
            environment: all of it; this process's own when None.
            output: destination of both outputs, held open by the child alone; this process's own when None.
            silent: discard standard output, and leave the standard error as it is.
            grace_seconds: between SIGTERM and SIGKILL.
        """
        self._grace = grace_seconds
        setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
        signalled = [] if setpriv is None else [setpriv, "--pdeathsig", "TERM", "--"]
        self._process = _starter.submit(
            subprocess.Popen,
            ["/bin/sh", "-c", _WATCHED, str(max(1, round(grace_seconds * 10))), *signalled, *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if silent else output,
            stderr=output,
            start_new_session=True,
        ).result()

    @property
    def pid(self) -> int:
        """Process id of the child: the shell that started it has become it."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the child runs."""
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs, the negative signal if one ended it."""
        return self._process.poll()

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL after the grace, to the child and the rest of its group."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._grace)
        # The group outlives the child as long as the watcher is in it, so that its number cannot be
        # another's by now.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
