"""Runs in separate process groups, killed at chosen instants."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Zygote:
    def __init__(self, data: Path, method: str, **config: object) -> None:
        self.data, self.method, self.config = data, method, config
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.line() == "ready"

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def start(self, root: Path, workers: int) -> int:
        """Start or resume the run of `root` in a process group and return the group's id."""
        command = {
            "data": str(self.data),
            "folder": str(root / "run"),
            "store": str(root / "store"),
            "workers": workers,
            "method": self.method,
            "config": self.config,
        }
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return int(self.line())

    def end(self, root: Path) -> bool:
        """Wait for the run's end and return whether it ended by itself."""
        status = int(self.line())
        assert status == 0 or os.WIFSIGNALED(status), "the run failed by itself; see the log above"
        lock = root / "run" / ".lock"
        if lock.exists():
            # A forked worker holds its parent's lock until it is dead, too.
            with lock.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        return status == 0

    def run(self, root: Path, workers: int, kill_at: tuple[int, float] | None = None) -> bool:
        """Start or resume a run and return whether it ended by itself.

        `kill_at` is (rounds, seconds): kill the run so long after so many rounds are committed in total.
        """
        pid = self.start(root, workers)
        if kill_at is not None:
            rounds, delay = kill_at
            while committed(root) < rounds and alive(pid):
                time.sleep(0.002)
            time.sleep(delay)
            kill(pid)
        return self.end(root)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def kill(pid: int) -> None:
    """Send SIGKILL to the whole process group; do nothing if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def committed(root: Path) -> int:
    """The number of rounds of the run that are on disk."""
    history = root / "run" / "history.jsonl"
    return history.read_bytes().count(b"\n") if history.exists() else 0
