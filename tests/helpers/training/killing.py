"""Runs in process groups of their own, killed at chosen instants."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.forked import fork
from model_store.store import Store
from training.config import RunConfig
from training.data.federation import load_federation
from training.engine import pool
from training.methods.registry import method, methods
from training.run import Run, execute

# Imports all of them, once for all processes that are forked from one that imports this module.
methods()


class Killable:
    """Runs of one federation, each in a process that is forked with all imports made."""

    def __init__(self, data: Path, method: str, **config: object) -> None:
        self.data, self.method, self.config = data, method, config

    def start(self, root: Path, workers: int) -> Any:
        """Start or resume the run of `root` in a process group of its own; returns its process."""
        return fork(_run, self.data, root, workers, self.method, self.config)

    def end(self, root: Path, process: Any) -> bool:
        """Wait for the run's end and return whether it ended by itself."""
        process.join()
        assert process.exitcode <= 0, "the run failed by itself; see the log above"
        lock = root / "run" / ".lock"
        if lock.exists():
            # A forked worker holds its parent's lock until it is dead, too.
            with lock.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        return bool(process.exitcode == 0)

    def run(self, root: Path, workers: int, kill_at: tuple[int, float] | None = None) -> bool:
        """Start or resume a run and return whether it ended by itself.

        `kill_at` is (rounds, seconds): kill the run so long after so many rounds are committed in total.
        """
        process = self.start(root, workers)
        if kill_at is not None:
            rounds, delay = kill_at
            while committed(root) < rounds and process.is_alive():
                time.sleep(0.002)
            time.sleep(delay)
            kill(process.pid)
        return self.end(root, process)


def kill(pid: int) -> None:
    """Send SIGKILL to the whole process group; do nothing if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            # It has not made its group yet, and started no worker.
            os.kill(pid, signal.SIGKILL)


def committed(root: Path) -> int:
    """The number of rounds of the run that are on disk."""
    history = root / "run" / "history.jsonl"
    return history.read_bytes().count(b"\n") if history.exists() else 0


def _run(data: Path, root: Path, workers: int, name: str, config: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    # Workers are forked, too: the tests examine how a run survives a kill.
    context = multiprocessing.get_context("fork")
    pool.process_context = lambda: context  # type: ignore[assignment, return-value]
    # A forked worker inherits both ends of its pipe and never sees it closed: do not wait for it to end.
    pool._GOODBYE_S = 0.0
    job = Run(
        load_federation(data),
        name,
        method(name).config(**{"width": 2, "learning_rate": 0.01} | config),
        RunConfig(seed=3, consent="all", participation=0.7),
    )
    execute(job, root / "run", workers=workers, resume=True, store=Store(root / "store"))
