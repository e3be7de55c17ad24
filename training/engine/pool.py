"""A pool of worker processes that run the sites' tasks and return the results in task order.

`Inline` does the same in this process, for debugging and for steps too small for a process of their own.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Protocol

from training.algorithm import Algorithm
from training.engine.client import RunEnvironment
from training.engine.egress import SiteSpec
from training.engine.worker import Delivery, Failure, Task, Worker, serve
from training.processes import process_context

_GOODBYE_S = 5.0


class Pool(Protocol):
    """Runs tasks. `window` bounds how many uploads are on disk at once.

    `quorum` is how many sites of a round must deliver what the server accepts, or all of a round with fewer.
    Where none is given, all must.
    """

    window: int

    @property
    def quorum(self) -> int:
        """See above."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Delivery | Failure]:
        """Run the tasks and yield their results in task order."""


class Inline:
    """Runs the sites' steps in this process, one after the other."""

    def __init__(
        self,
        algorithm: Algorithm,
        sites: Sequence[SiteSpec],
        environment: RunEnvironment,
        root: Path,
        *,
        quorum: int | None = None,
    ) -> None:
        self.window = 1
        self.quorum = quorum or len(sites)
        self._worker = Worker(algorithm, sites, environment, root)
        self._environment = environment

    def run(self, tasks: Sequence[Task]) -> Iterator[Delivery | Failure]:
        """Run the tasks in order."""
        for task in tasks:
            with self._environment.applied():
                answer = self._worker.answer(task)
            yield answer


class WorkerPool:
    """Persistent worker processes. A site always runs in the same process, so its data is in memory once.

    `window` bounds how far the fastest worker may run ahead of the first result still missing.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        sites: Sequence[SiteSpec],
        environment: RunEnvironment,
        root: Path,
        workers: int,
        *,
        quorum: int | None = None,
    ) -> None:
        # By plain pickle: in the arguments of a process torch sends each tensor as a file descriptor, and a
        # message holds 256 of them.
        self._work = pickle.dumps((algorithm, tuple(sites), environment, root))
        self._worker_of = spread(sites, workers)
        self.window = 2 * workers + 1
        self.quorum = quorum or len(sites)
        self._context = process_context()
        self._processes = [self._start(number) for number in range(workers)]

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, connection in self._processes:
            connection.close()
        for process, _ in self._processes:
            # After an error, do not wait for a step that may take minutes.
            process.join(_GOODBYE_S if error is None else 0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()

    def run(self, tasks: Sequence[Task]) -> Iterator[Delivery | Failure]:
        """Run the tasks and yield their results in task order, independent of which finishes first.

        A worker that dies fails only its current task, and is replaced. Task `i` starts only after all
        results up to `i - window` were consumed.
        """
        queues: dict[int, deque[int]] = {worker: deque() for worker in range(len(self._processes))}
        for index, task in enumerate(tasks):
            queues[self._worker_of[task.site]].append(index)
        busy: dict[int, int] = {}
        done: dict[int, Delivery | Failure] = {}

        def keep_busy() -> None:
            for worker, queue in queues.items():
                if worker not in busy and queue and queue[0] < due + self.window:
                    busy[worker] = queue.popleft()
                    self._send(worker, tasks[busy[worker]])

        for due in range(len(tasks)):
            keep_busy()
            while due not in done:
                ready = wait([self._processes[worker][1] for worker in busy])
                for worker in [worker for worker in busy if self._processes[worker][1] in ready]:
                    index = busy.pop(worker)
                    done[index] = self._receive(worker, tasks[index])
                # Before the yield, so that workers are busy while the caller processes the result.
                keep_busy()
            yield done.pop(due)

    def _send(self, worker: int, task: Task) -> None:
        try:
            self._processes[worker][1].send(task)
        except (BrokenPipeError, ConnectionResetError):
            # The worker died while idle, so no task failed: its replacement gets the task.
            self._replace(worker)
            self._processes[worker][1].send(task)

    def _receive(self, worker: int, task: Task) -> Delivery | Failure:
        try:
            answer: Delivery | Failure = self._processes[worker][1].recv()
            return answer
        except (EOFError, ConnectionResetError):
            code = self._replace(worker)
            how = (
                f"was killed by signal {-code}"
                if code is not None and code < 0
                else f"exited with code {code}"
            )
            return Failure(task.site, f"its worker process {how}; a new one was started")

    def _replace(self, worker: int) -> int | None:
        process, connection = self._processes[worker]
        connection.close()
        process.join()
        code = process.exitcode
        process.close()
        self._processes[worker] = self._start(worker)
        return code

    def _start(self, number: int) -> tuple[BaseProcess, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=serve, args=(there, self._work, number), daemon=True)
        process.start()
        # Only the child may hold its end: then its death closes the pipe, and our death ends the child.
        there.close()
        return process, here


def spread(sites: Sequence[SiteSpec], workers: int) -> dict[str, int]:
    """Assign sites to workers, the largest first, each to the worker with the smallest load so far."""
    load = [0] * workers
    placed: dict[str, int] = {}
    for site in sorted(sites, key=lambda site: (-(site.cases or 1), site.name)):
        worker = load.index(min(load))
        load[worker] += site.cases or 1
        placed[site.name] = worker
    return placed
