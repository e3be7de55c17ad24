"""The engine: run a method's plan over its sites, which are worker processes here or hospitals on a network.

The result depends on the algorithm, the sites and the seed, and on the sites' keys if they add noise. It does
not depend on the number of workers, the order in which sites finish, or how often the run was killed and
resumed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from training.algorithm import Algorithm, Memory, Phase, ServerStage
from training.config import Defence
from training.engine.client import RunEnvironment
from training.engine.egress import SiteSpec, check_plan, may_take_part
from training.engine.folder import RunCheckpoint, RunFolder, free_slot
from training.engine.history import Observer, RoundEntry, Silent
from training.engine.pool import Inline, Pool, WorkerPool
from training.engine.rounds import Rounds


@dataclass(frozen=True)
class RunOutcome:
    """A finished run: the server's memory and the history of the rounds."""

    server: Memory
    history: tuple[RoundEntry, ...]


@dataclass(frozen=True)
class _Standing:
    """Current state of a run: the last checkpoint (None before the first) and the data it points at."""

    checkpoint: RunCheckpoint | None
    server: Memory
    history: tuple[RoundEntry, ...]


class FederationEngine:
    """Run an algorithm over sites.

    `workers` is the number of processes that run the sites' steps, at most one per site; with 0 this process
    runs them. With `pool`, such as one of hospitals on a network, that pool runs them instead.
    `participation` is the share of the sites that is drawn for a round (at least one site), `quorum` how many
    of those must deliver: all, if it is not given. A pool of its own has its own.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        sites: Sequence[SiteSpec],
        environment: RunEnvironment,
        folder: RunFolder,
        *,
        workers: int,
        participation: float = 1.0,
        defence: Defence | None = None,
        observer: Observer | None = None,
        pool: Pool | None = None,
        quorum: int | None = None,
    ) -> None:
        self._algorithm = algorithm
        self._plan = algorithm.plan()
        self._sites = tuple(sites)
        self._environment = environment
        self._folder = folder
        self._workers = workers
        self._participation = participation
        self._defence = defence or Defence()
        self._observer = observer or Silent()
        self._remote = pool
        self._quorum = quorum

    def run(self) -> RunOutcome:
        """Run the plan from the last committed round (or the beginning) to its end.

        Raises EgressRefused before the first step, ConfigurationError when the defence needs more sites,
        FederationError when a site's data cannot be read, RoundFailed when too few sites of a round
        delivered, AlgorithmError when the method violates its declaration.
        """
        check_plan(self._plan, self._sites)
        standing = self._standing()
        try:
            if not self._done(standing):
                with self._pool() as pool:
                    rounds = Rounds(
                        self._sites,
                        self._environment,
                        pool,
                        self._folder.exchange,
                        participation=self._participation,
                        defence=self._defence,
                        observer=self._observer,
                    )
                    rounds.check(self._plan)
                    rounds.load()
                    while not self._done(standing):
                        standing = self._advance(standing, rounds)
        finally:
            # Not after every round: overwriting existing files is several times as fast.
            self._folder.empty_exchange()
        if standing.checkpoint is not None:
            self._folder.delete_unused(standing.checkpoint)
        return RunOutcome(standing.server, standing.history)

    def _done(self, standing: _Standing) -> bool:
        return standing.checkpoint is not None and standing.checkpoint.step >= len(self._plan)

    def _standing(self) -> _Standing:
        found = self._folder.checkpoint()
        if found is None:
            context = self._environment.context("initial", 0, 1)
            return _Standing(None, self._algorithm.initial(context), ())
        history = tuple(RoundEntry.from_json(note) for note in self._folder.history(found))
        if self._asks_again(found, history):
            found, history = self._folder.take_back(found), history[:-1]
        return _Standing(found, self._folder.server(found.server_slot), history)

    def _asks_again(self, found: RunCheckpoint, history: Sequence[RoundEntry]) -> bool:
        """Whether only the last phase of a finished run must be repeated.

        It must when a hospital's consent changed after the run, or a site failed in that phase.
        """
        last = self._plan[-1]
        if found.step < len(self._plan) or not isinstance(last, Phase) or not last.consent or last.rounds > 1:
            return False
        return set(history[-1].sites) != {site.name for site in self._sites if may_take_part(last, site)}

    def _pool(self) -> AbstractContextManager[Pool]:
        if self._remote is not None:
            return nullcontext(self._remote)
        arguments = (self._algorithm, self._sites, self._environment, self._folder.root)
        if self._workers == 0:
            return nullcontext(Inline(*arguments, quorum=self._quorum))
        return WorkerPool(*arguments, min(self._workers, len(self._sites)), quorum=self._quorum)

    def _advance(self, standing: _Standing, rounds: Rounds) -> _Standing:
        """Run and commit one round of a phase or one step of a server stage."""
        checkpoint = standing.checkpoint
        index, round_ = (checkpoint.step, checkpoint.round) if checkpoint else (0, 0)
        step = self._plan[index]
        if isinstance(step, Phase):
            server, entry, slots = rounds.run(
                index, step, round_, standing.server, checkpoint, _announced(standing.history, step)
            )
        else:
            slots = dict(checkpoint.site_slots) if checkpoint else {}
            server, entry = self._stage(step, round_, standing.server)
        last = round_ + 1 >= entry.rounds
        committed = self._folder.commit(
            RunCheckpoint(
                index + 1 if last else index,
                0 if last else round_ + 1,
                free_slot(checkpoint),
                slots,
                checkpoint.history_bytes if checkpoint else 0,
            ),
            server,
            entry.to_json(),
            checkpoint,
        )
        self._observer.round_finished(entry)
        return _Standing(committed, server, (*standing.history, entry))

    def _stage(self, stage: ServerStage, step: int, server: Memory) -> tuple[Memory, RoundEntry]:
        started = time.perf_counter()
        self._observer.round_started(stage.name, step, stage.steps, ())
        context = self._environment.context(stage.name, step, stage.steps)
        with self._environment.applied():
            server = stage.step(context, server)
        return server, RoundEntry(stage.name, step, stage.steps, time.perf_counter() - started)


def _announced(history: Sequence[RoundEntry], phase: Phase) -> dict[str, float]:
    """The weight that each site gave in the first round of the phase that it was in."""
    found: dict[str, float] = {}
    for entry in history:
        if entry.phase == phase.name:
            for site, part in entry.sites.items():
                found.setdefault(site, part.weight)
    return found
