"""The in-process engine: a federation on one machine, its sites in worker processes.

The result depends on the algorithm, the sites and the seed; not on the number of workers, on which site is
done first, or on how often the run was killed and resumed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.algorithm import Algorithm, Memory, Phase, RoundResult, ServerStage, State
from training.engine.client import Surroundings
from training.engine.egress import SiteSpec, check_plan, may_take_part
from training.engine.folder import Checkpoint, RunFolder, Slot, other
from training.engine.history import Observer, RoundEntry, Silent, SiteEntry
from training.engine.pool import Inline, Pool, WorkerPool
from training.engine.reduction import Reducer
from training.engine.seeds import generator
from training.engine.tensorfile import read_tensors, size_of, write_tensors
from training.engine.worker import Delivery, Failure, Task
from training.errors import AlgorithmError, FederationError, RoundFailed, SiteFailed

METRIC_BYTES = 8  # a metric travels as one float64


@dataclass(frozen=True)
class Outcome:
    """A finished run: the server's memory, and what happened."""

    server: Memory
    history: tuple[RoundEntry, ...]


@dataclass
class _Standing:
    """Where the run stands: what a checkpoint holds, in memory."""

    step: int
    round: int
    server: Memory
    server_slot: Slot | None
    site_slots: dict[str, Slot]
    history: list[RoundEntry]


class InProcessEngine:
    """Runs an algorithm over sites.

    `workers` processes do the sites' steps, at most one per site; with 0 this process does them.
    `participation` is the share of the sites that is drawn for a round, at least one.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        sites: Sequence[SiteSpec],
        surroundings: Surroundings,
        folder: RunFolder,
        *,
        workers: int,
        participation: float = 1.0,
        observer: Observer | None = None,
    ) -> None:
        self._algorithm = algorithm
        self._plan = algorithm.plan()
        self._sites = tuple(sites)
        self._surroundings = surroundings
        self._folder = folder
        self._workers = workers
        self._participation = participation
        self._observer = observer or Silent()

    def run(self) -> Outcome:
        """Run the plan from the last committed round (or the beginning) to its end.

        Raises EgressRefused before anything starts, FederationError when a site's data cannot be read,
        RoundFailed when no site of a round delivered, AlgorithmError when the method broke its declaration.
        """
        check_plan(self._plan, self._sites)
        standing = self._standing()
        if standing.step < len(self._plan):
            with self._pool() as pool:
                self._load(pool)
                while standing.step < len(self._plan):
                    self._advance(standing, pool)
        return Outcome(standing.server, tuple(standing.history))

    def _pool(self) -> AbstractContextManager[Pool]:
        arguments = (self._algorithm, self._sites, self._surroundings, self._folder.root)
        if self._workers == 0:
            return nullcontext(Inline(*arguments))
        return WorkerPool(*arguments, min(self._workers, len(self._sites)))

    # ------------------------------------------------------------------ where the run stands

    def _standing(self) -> _Standing:
        found = self._folder.checkpoint()
        if found is None:
            server = self._algorithm.initial(self._surroundings.context("initial", 0, 1))
            return _Standing(0, 0, server, None, {}, [])
        history = [RoundEntry.from_json(entry) for entry in found.record["rounds"]]
        server = self._folder.server(found.server_slot)
        return _Standing(found.step, found.round, server, found.server_slot, dict(found.site_slots), history)

    def _commit(
        self, standing: _Standing, entry: RoundEntry, server: Memory, slots: Mapping[str, Slot]
    ) -> None:
        """Move on by one round, on disk first."""
        standing.server, standing.site_slots = server, dict(slots)
        standing.server_slot = other(standing.server_slot)
        standing.history.append(entry)
        standing.round += 1
        if standing.round >= entry.rounds:
            standing.step, standing.round = standing.step + 1, 0
        record = {"rounds": [entry.to_json() for entry in standing.history]}
        self._folder.commit(
            Checkpoint(standing.step, standing.round, standing.server_slot, standing.site_slots, record),
            server,
        )

    def _load(self, pool: Pool) -> None:
        """Have every site read its data, so that what cannot be read is known before the first round."""
        answers = list(pool.run([Task(site.name) for site in self._sites]))
        failures = [
            f"site {answer.site}: {answer.reason}" for answer in answers if isinstance(answer, Failure)
        ]
        if failures:
            raise FederationError("the sites' data cannot be read", failures)

    # ------------------------------------------------------------------ one round

    def _advance(self, standing: _Standing, pool: Pool) -> None:
        step = self._plan[standing.step]
        started = time.perf_counter()
        if isinstance(step, ServerStage):
            self._observer.round_started(step.name, standing.round, step.steps, ())
            context = self._surroundings.context(step.name, standing.round, step.steps)
            server = self._algorithm.server_stage(context, standing.server)
            entry = RoundEntry(step.name, standing.round, step.steps, time.perf_counter() - started)
            self._commit(standing, entry, server, standing.site_slots)
            self._observer.round_finished(entry)
            return
        sites, absent = self._participants(step, standing.round)
        self._observer.round_started(
            step.name, standing.round, step.rounds, tuple(site.name for site in sites)
        )
        server, slots = standing.server, dict(standing.site_slots)
        entries: dict[str, SiteEntry] = {}
        dropped: dict[str, str] = {}
        if sites:
            result = self._round(step, standing, pool, sites, slots, entries, dropped)
            context = self._surroundings.context(step.name, standing.round, step.rounds)
            server = self._algorithm.server_step(context, server, result)
        else:
            self._observer.warning(f"phase '{step.name}' skipped: {'; '.join(sorted(set(absent.values())))}")
        seconds = time.perf_counter() - started
        entry = RoundEntry(step.name, standing.round, step.rounds, seconds, entries, dropped, absent)
        self._commit(standing, entry, server, slots)
        self._observer.round_finished(entry)

    def _participants(self, phase: Phase, round_: int) -> tuple[tuple[SiteSpec, ...], dict[str, str]]:
        """The sites of a round in their fixed order, and why the others are not asked."""
        absent: dict[str, str] = {}
        for site in self._sites:
            if phase.consent and not site.consents:
                absent[site.name] = f"no consent to '{phase.name}'"
            elif not may_take_part(phase, site):
                kinds = ", ".join(sorted({group.kind for group in phase.uploads if group.essential}))
                absent[site.name] = f"egress policy does not allow what '{phase.name}' uploads ({kinds})"
        able = [site for site in self._sites if site.name not in absent]
        if able and self._participation < 1 and not phase.everyone and not phase.consent:
            count = max(1, round(self._participation * len(able)))
            draw = generator(self._surroundings.seed, phase.name, round_, "", "participation")
            drawn = set(torch.randperm(len(able), generator=draw)[:count].tolist())
            absent |= {site.name: "not drawn" for index, site in enumerate(able) if index not in drawn}
        return tuple(site for site in able if site.name not in absent), absent

    def _round(
        self,
        phase: Phase,
        standing: _Standing,
        pool: Pool,
        sites: Sequence[SiteSpec],
        slots: dict[str, Slot],
        entries: dict[str, SiteEntry],
        dropped: dict[str, str],
    ) -> RoundResult:
        """Run the sites' steps; fills in memory slots, entries of who delivered, reasons of who did not."""
        tasks, received = self._tasks(phase, standing, sites, pool.window)
        reducer = Reducer(phase)
        for answer in pool.run(tasks):
            if isinstance(answer, Failure):
                if answer.fatal:
                    raise AlgorithmError(answer.reason)
                dropped[answer.site] = answer.reason
            else:
                try:
                    reducer.add(answer.site, _read(phase, answer), answer.weight, answer.metrics)
                except SiteFailed as error:
                    dropped[answer.site] = str(error)
                else:
                    if answer.slot is not None:
                        slots[answer.site] = answer.slot
                    entry = entries[answer.site] = _entry(answer, received[answer.site])
                    self._observer.site_finished(phase.name, standing.round, answer.site, entry)
            if answer.site in dropped:
                self._observer.warning(
                    f"phase '{phase.name}', round {standing.round + 1}: site {answer.site} dropped: "
                    f"{dropped[answer.site]}"
                )
        if not entries:
            reasons = "; ".join(f"{site}: {reason}" for site, reason in dropped.items())
            raise RoundFailed(
                f"phase '{phase.name}', round {standing.round + 1}: no site delivered ({reasons}). "
                "Mend the cause and resume"
            )
        return reducer.result()

    def _tasks(
        self, phase: Phase, standing: _Standing, sites: Sequence[SiteSpec], window: int
    ) -> tuple[list[Task], dict[str, dict[str, int]]]:
        """The sites' tasks with their downloads written out, and the bytes each site downloads by group."""
        files: dict[tuple[int, ...], Path] = {}
        kept: list[State] = []  # keeps the tensors alive, so that an id stands for one of them only
        tasks: list[Task] = []
        received: dict[str, dict[str, int]] = {}
        for index, site in enumerate(sites):
            states = self._algorithm.broadcast(phase, standing.server, site.name)
            declared = [group.name for group in phase.downloads]
            if sorted(states) != sorted(declared):
                raise AlgorithmError(
                    f"phase '{phase.name}': declared the downloads {sorted(declared)}, made {sorted(states)}"
                )
            for state in states.values():
                if _key(state) not in files:
                    kept.append(state)
                    files[_key(state)] = self._folder.exchange / f"down-{len(kept)}"
                    write_tensors(files[_key(state)], state)
            received[site.name] = {name: size_of(state) for name, state in states.items()}
            tasks.append(
                Task(
                    site.name,
                    standing.step,
                    standing.round,
                    {name: files[_key(state)] for name, state in states.items()},
                    standing.site_slots.get(site.name),
                    self._folder.exchange / f"up-{index % window}",
                )
            )
        return tasks, received


def _key(state: State) -> tuple[int, ...]:
    """What two states that hold the same tensors have in common."""
    return tuple(id(part) for name, tensor in state.items() for part in (name, tensor))


def _read(phase: Phase, delivery: Delivery) -> dict[str, State]:
    """A delivery's tensors. Totals are made from views; what is kept must outlive the file's next use."""
    copied = {group.name: group.reduction in ("collect", "concat") for group in phase.uploads}
    return {name: read_tensors(path, copy=copied[name])[0] for name, path in delivery.files.items()}


def _entry(delivery: Delivery, received: Mapping[str, int]) -> SiteEntry:
    sent = dict(delivery.sent)
    if delivery.metrics:
        sent["metrics"] = METRIC_BYTES * len(delivery.metrics)
    return SiteEntry(delivery.weight, delivery.metrics, sent, received, delivery.withheld, delivery.seconds)
