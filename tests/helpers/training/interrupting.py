"""A run that is interrupted in every round, and resumed in this process until it ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from model_store.store import Store
from training.engine.history import RoundEntry, Silent, SiteEntry
from training.run import Result, Run, execute


class _Interrupted(BaseException):
    """Not an Exception: the engine must not take it for the failure of a site."""


class _Interruption(Silent):
    """Interrupts a round that no earlier attempt reached."""

    def __init__(self, reached: set[tuple[str, int]]) -> None:
        self._reached = reached
        self._expected: tuple[str, ...] = ()

    def round_started(self, phase: str, round: int, rounds: int, sites: tuple[str, ...]) -> None:
        """Note the sites of the round."""
        self._expected = sites

    def site_finished(self, phase: str, round: int, site: str, entry: SiteEntry) -> None:
        """Interrupt before the round is committed, when its first site has written its memory."""
        if site == self._expected[0]:
            self._interrupt(phase, round)

    def round_finished(self, entry: RoundEntry) -> None:
        """Interrupt after the commit of a step of the server, or of a round without sites."""
        if not entry.sites:
            self._interrupt(entry.phase, entry.round)

    def _interrupt(self, phase: str, round: int) -> None:
        if (phase, round) not in self._reached:
            self._reached.add((phase, round))
            raise _Interrupted


def interrupted(run: Run, folder: Path, store: Store, name: str | None = None) -> tuple[Result, int]:
    """Execute the run, interrupted once in every round; the result, and the number of interruptions.

    Each attempt has only what is in the folder, and global random states of its own.
    """
    reached: set[tuple[str, int]] = set()
    while True:
        attempt = len(reached)
        torch.manual_seed(attempt)
        np.random.seed(attempt)
        again = Run(run.federation, run.method, run.config, run.settings)
        try:
            result = execute(
                again,
                folder,
                workers=0,
                resume=attempt > 0,
                observer=_Interruption(reached),
                store=store,
                name=name,
            )
        except _Interrupted:
            continue
        return result, attempt
