"""Joined runs: while a graph is busy, the slices of several requests wait, and go through it in one run.

    idle     a call runs at once, alone: it never waits for others to join it
    busy     calls wait in line; when a run ends, the first in line runs, joined by those behind it that fit

Every call gets, bit for bit, what it would get alone. A library chooses its kernels by the shape of a run. So
a composition of a run, such as 1 + 1 + 3 slices, is used after its first run gave the same bits as its parts
alone. A graph with a composition that did not runs every call alone from then on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from service.errors import RunTooLong

# What a graph gives for slices [S, C, H, W]: arrays [S, ...].
Run = Callable[[NDArray[np.float32]], Sequence[NDArray[np.generic]]]

_Outcome = Sequence[NDArray[np.generic]] | Exception

_log = logging.getLogger("locum.service")


@dataclass
class _Call:
    """One call in line. Its future gives its outputs, or the calls that it has to run."""

    slices: NDArray[np.float32]
    turn: Future[Sequence[NDArray[np.generic]] | _Batch] = field(default_factory=Future)


class _Batch(list[_Call]):
    """Calls of one run, the first of which runs it."""


class JoinedRuns:
    """Runs of one graph. Safe to call from several threads at once.

    `run` is a run of the graph alone. `compositions` are the runs that may be joined, each by its calls'
    numbers of slices.
    """

    def __init__(self, name: str, run: Run, *, at_once: int, most: Callable[[tuple[int, ...]], int]) -> None:
        """Join calls of `run`.

        Args:
            name: of the graph, for the log.
            run: runs slices [S, C, H, W].
            at_once: runs at the same time.
            most: of the shape of a slice [C, H, W], the slices of a joined run.
        """
        self._name = name
        self.run = run
        self._at_once = at_once
        self._most = most
        self._lock = threading.Lock()
        self._line: deque[_Call] = deque()
        self._running = 0
        self.compositions: set[tuple[int, ...]] = set()
        self._joins = True

    @property
    def waiting(self) -> int:
        """Number of calls in line."""
        return len(self._line)

    def __call__(self, slices: NDArray[np.float32]) -> Sequence[NDArray[np.generic]]:
        """The outputs for slices [S, C, H, W]. Raises what `run` raises for them."""
        call = _Call(slices)
        with self._lock:
            if self._running < self._at_once:
                self._running += 1
                call.turn.set_result(_Batch([call]))
            else:
                self._line.append(call)
        turn = call.turn.result()
        if not isinstance(turn, _Batch):
            return turn
        try:
            if len(turn) == 1:
                return self.run(slices)
            return self._lead(turn)
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the first in line and those that fit."""
        with self._lock:
            if not self._line:
                self._running -= 1
                return
            batch = _Batch([self._line.popleft()])
            shape, total = batch[0].slices.shape[1:], len(batch[0].slices)
            most = self._most(shape) if self._joins else 1
            while self._line:
                behind = self._line[0].slices
                if behind.shape[1:] != shape or total + len(behind) > most:
                    break
                batch.append(self._line.popleft())
                total += len(behind)
        batch[0].turn.set_result(batch)

    def _lead(self, batch: _Batch) -> Sequence[NDArray[np.generic]]:
        """Run a batch, give the others theirs, and return the first one's outputs."""
        try:
            first, *others = self._outcomes([call.slices for call in batch])
        except BaseException as error:
            # The others wait for their futures without a timeout.
            for call in batch[1:]:
                call.turn.set_exception(error)
            raise
        for call, outcome in zip(batch[1:], others, strict=True):
            if isinstance(outcome, Exception):
                call.turn.set_exception(outcome)
            else:
                call.turn.set_result(outcome)
        if isinstance(first, Exception):
            raise first
        return first

    def _outcomes(self, parts: list[NDArray[np.float32]]) -> list[_Outcome]:
        composition = tuple(map(len, parts))
        known = composition in self.compositions
        alone = [] if known else [self._outcome(part) for part in parts]
        joined = self._outcome(np.concatenate(parts))
        if isinstance(joined, Exception):
            # One of them may be at fault, or all together too large.
            return alone or [self._outcome(part) for part in parts]
        ends = np.cumsum(composition)
        cut = [
            [array[end - len(part) : end] for array in joined] for part, end in zip(parts, ends, strict=True)
        ]
        if known:
            return [*cut]
        if all(_same(*pair) for pair in zip(cut, alone, strict=True)):
            self.compositions.add(composition)
        else:
            self._joins = False
            _log.info("graph %s: a joined run gave other bits, so its runs are not joined", self._name)
        return alone

    def _outcome(self, slices: NDArray[np.float32]) -> _Outcome:
        try:
            return self.run(slices)
        except RunTooLong:
            # Every call of the batch gets it: to run each of them would hold the graph for as long again.
            raise
        except Exception as error:  # passed on to the call it belongs to
            return error


def _same(some: _Outcome, others: _Outcome) -> bool:
    return (
        not isinstance(some, Exception)
        and not isinstance(others, Exception)
        and all(one.tobytes() == other.tobytes() for one, other in zip(some, others, strict=True))
    )
