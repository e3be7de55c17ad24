"""A campaign of faults against a running system, in batches: what goes wrong next is drawn from a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, Generic, TypeVar

import numpy as np

from benchmarks.harness.cells import Cell, Row

HEADER = ("count", "median", "90 %", "largest", "never")


class NeverHappened(Exception):
    """Something that must happen did not happen in time."""


F = TypeVar("F")


class Campaign(ABC, Generic[F]):
    """A batch of faults, of which F says how each went.

    `draw` draws kinds and instants, and `broken` says what must not have happened.
    """

    def __init__(self, cell: Cell) -> None:
        self.draw = Random(f"{cell['seed']} {cell['batch']}")
        self.strikes: list[F] = []
        self.broken: list[str] = []
        self._count = int(cell["faults"])

    @abstractmethod
    def strike(self) -> F:
        """Inject one fault; its kind and instant are drawn."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for recovery from every fault, and for the end."""

    def run(self) -> None:
        """Inject all faults and finish."""
        try:
            for _ in range(self._count):
                self.strikes.append(self.strike())
            self.finish()
        except NeverHappened as error:
            self.broken.append(f"unbounded: {error}")


def batches(faults: int, batch: int, seed: int) -> list[dict[str, Any]]:
    """The cells of at least so many faults, without what differs between campaigns."""
    return [{"batch": number, "faults": batch, "seed": seed} for number in range(-(-faults // batch))]


def violated(rows: Sequence[Row]) -> list[str]:
    """The section of violated invariants."""
    broken = [violation for row in rows for violation in row["result"]["violations"]]
    listed = "\n".join(f"- {violation}" for violation in broken) or "None."
    return [f"## Violated invariants: {len(broken)}", listed]


def recovery(rows: Sequence[Row], kinds: Iterable[str]) -> list[list[object]]:
    """Under `HEADER`, the recoveries of each kind of fault that has some, then of all."""
    faults = [fault for row in rows for fault in row["result"]["faults"]]
    body: list[list[object]] = []
    for kind in [*kinds, None]:
        chosen = [fault for fault in faults if kind in (None, fault["kind"])]
        seconds = [fault["recovered_s"] for fault in chosen if fault["recovered_s"] is not None]
        if seconds:
            figures = [f"{value:.1f}" for value in np.quantile(seconds, (0.5, 0.9, 1.0))]
            body.append([kind or "all", len(chosen), *figures, len(chosen) - len(seconds)])
    return body
