"""Run one round of a phase: choose the sites, send the downloads, reduce the uploads."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from training.algorithm import Memory, Phase, Plan, SiteSize, State
from training.config import Defence
from training.engine.client import RunEnvironment
from training.engine.defence import least_uploads
from training.engine.egress import SiteSpec, may_take_part
from training.engine.folder import RunCheckpoint, Slot, free_slot
from training.engine.history import Observer, RoundEntry, SiteEntry, majority, overclaim
from training.engine.pool import Pool
from training.engine.reduction import Reducer
from training.engine.seeds import generator
from training.engine.tensorfile import read_tensors, size_of, write_tensors
from training.engine.worker import Delivery, Failure, Task
from training.errors import AlgorithmError, ConfigurationError, FederationError, RoundFailed, SiteFailed

_Key = tuple[tuple[str, int], ...]

METRIC_BYTES = 8  # a metric travels as one float64
_MOST = 1e15  # of a metric, a weight or a time: far beyond all that occur, and sums of them stay finite


class Tally:
    """What a round comes to, site by site: the history's entries, and the slots of the sites' memories.

    `before` has the slots of the round before, to which a site that is dropped goes back.
    """

    def __init__(self, before: Mapping[str, Slot]) -> None:
        self._before = before
        self.slots = dict(before)
        self.entries: dict[str, SiteEntry] = {}
        self.dropped: dict[str, str] = {}
        self.refused: dict[str, SiteEntry] = {}

    def take(self, site: str, entry: SiteEntry, slot: Slot | None) -> None:
        """Count a delivery; without a slot, the site's memory stays."""
        self.entries[site] = entry
        if slot is not None:
            self.slots[site] = slot

    def drop(self, site: str, reason: str, delivered: SiteEntry | None = None) -> None:
        """Count a site out, with what it delivered."""
        delivered = self.entries.pop(site, delivered)
        if delivered is not None:
            self.refused[site] = replace(delivered, weight=0.0)
        self.dropped[site] = reason
        self.slots.pop(site, None)
        if site in self._before:
            self.slots[site] = self._before[site]

    def entry(self, phase: Phase, round_: int, seconds: float, absent: dict[str, str]) -> RoundEntry:
        """For the history."""
        return RoundEntry(
            phase.name, round_, phase.rounds, seconds, self.entries, self.dropped, absent, self.refused
        )


class Rounds:
    """Runs rounds over a pool of workers. Checkpoints are written by the engine."""

    def __init__(
        self,
        sites: Sequence[SiteSpec],
        environment: RunEnvironment,
        pool: Pool,
        exchange: Path,
        *,
        participation: float,
        defence: Defence,
        observer: Observer,
    ) -> None:
        self._sites = tuple(sites)
        self._environment = environment
        self._pool = pool
        self._exchange = exchange
        self._participation = participation
        self._defence = defence
        self._observer = observer
        self._sizes: dict[str, SiteSize] = {}
        self._reported: set[str] = set()

    def check(self, plan: Plan) -> None:
        """Check that every phase has the sites that the defence needs. Raises ConfigurationError."""
        how = self._defence
        least = least_uploads(how.reduction, how.trim, how.liars)
        averaging = [
            phase
            for phase in plan
            if isinstance(phase, Phase)
            and any(group.essential and group.reduction == "mean" for group in phase.uploads)
        ]
        counts = {phase.name: len(self._participants(phase, 0)[0]) for phase in averaging}
        problems = [
            f"defence.reduction: {how.reduction} needs {least} sites in a round of '{name}', found {count}; "
            "use another reduction, or more sites"
            for name, count in counts.items()
            if 0 < count < least
        ]
        if problems:
            raise ConfigurationError("the run cannot start", problems)

    def load(self) -> None:
        """Load every site's data, so that unreadable data is reported before the first round.

        Raises FederationError.
        """
        answers = list(self._pool.run([Task(site.name) for site in self._sites]))
        failures = [
            f"site {answer.site}: {answer.reason}" for answer in answers if isinstance(answer, Failure)
        ]
        if failures:
            raise FederationError("the sites' data cannot be read", failures)
        for site, answer in zip(self._sites, answers, strict=True):
            scored, images = (answer.scored, answer.images) if isinstance(answer, Delivery) else (None, None)
            self._sizes[site.name] = SiteSize(site.cases, site.cases if scored is None else scored, images)

    def run(
        self,
        step: int,
        phase: Phase,
        round_: int,
        server: Memory,
        checkpoint: RunCheckpoint | None,
        announced: Mapping[str, float],
    ) -> tuple[Memory, RoundEntry, dict[str, Slot]]:
        """Run one round. Returns the server's new memory, the history entry, and the sites' memory slots.

        `checkpoint` is that of the last committed round, with the slots of the sites' memories. `announced`
        has the weight that each site gave in its first round of this phase. More than that, or than the
        images that it announced before the first round, does not count.

        Raises RoundFailed when no site or fewer than the pool's quorum delivered, AlgorithmError when the
        method violates its declaration.
        """
        started = time.perf_counter()
        slots = checkpoint.site_slots if checkpoint else {}
        tally = Tally(slots)
        sites, absent = self._participants(phase, round_)
        self._observer.round_started(phase.name, round_, phase.rounds, tuple(site.name for site in sites))
        if sites:
            tasks, sent = self._tasks(step, phase, round_, server, checkpoint, sites)
            expected = phase.expected(server)
            reducer = Reducer(phase, self._defence)
            specs = {site.name: site for site in sites}
            for answer in self._pool.run(tasks):
                name, claimed = answer.site, None
                received = {group: size_of(state) for group, state in sent[name].items()}
                try:
                    if isinstance(answer, Delivery):
                        _check_figures(phase, answer, self._sizes[name])
                        most = _most_weight(self._sizes[name], announced.get(name))
                        if answer.weight > most:
                            answer, claimed = replace(answer, weight=most), answer.weight
                    noises = _noises(phase, specs[name], sent[name])
                    delivery = _take(
                        phase, answer, reducer, {**sent[name], **expected}, self._sizes[name], noises
                    )
                except SiteFailed as error:
                    delivered = _entry(answer, received) if isinstance(answer, Delivery) else None
                    tally.drop(name, str(error), delivered)
                    self._warn(phase, round_, name, f"dropped: {error}")
                    continue
                entry = replace(_entry(delivery, received), claimed=claimed)
                tally.take(name, entry, delivery.slot)
                if claimed is not None:
                    self._warn(phase, round_, name, overclaim(entry))
                self._observer.site_finished(phase.name, round_, name, entry)
            self._settle(phase, round_, reducer, tally)
            quorum = min(self._pool.quorum, len(sites))
            if len(tally.entries) < quorum:
                found = f"{len(tally.entries)} of {len(sites)} sites delivered, the quorum is {quorum}"
                found = found if tally.entries else "no site delivered"
                reasons = "; ".join(f"{site}: {reason}" for site, reason in tally.dropped.items())
                raise RoundFailed(
                    f"phase '{phase.name}', round {round_ + 1}: {found} ({reasons}). Fix the cause and resume"
                    f"{'' if quorum == 1 else ', or resume with a smaller --quorum'}"
                )
            context = self._environment.context(phase.name, round_, phase.rounds)
            result = reducer.result()
            self._report_majority(phase, round_, result.weights, tally)
            with self._environment.applied():
                server = phase.server_step(context, server, result)
        else:
            self._observer.warning(f"phase '{phase.name}' skipped: {'; '.join(sorted(set(absent.values())))}")
        seconds = time.perf_counter() - started
        return server, tally.entry(phase, round_, seconds, absent), tally.slots

    def _settle(self, phase: Phase, round_: int, reducer: Reducer, tally: Tally) -> None:
        """Apply the defence, and note what it did."""
        factors, reasons = reducer.settle()
        for site, factor in factors.items():
            tally.entries[site] = replace(tally.entries[site], scaled=factor)
            self._warn(
                phase,
                round_,
                site,
                f"had its update scaled by {factor:.3g}, because it was far larger than the others'",
            )
        for site, reason in reasons.items():
            tally.drop(site, reason)
            self._warn(phase, round_, site, f"dropped: {reason}")

    def _report_majority(self, phase: Phase, round_: int, weights: Mapping[str, float], tally: Tally) -> None:
        """Note the site that has more than half of the weight of a mean; warn of it once in a run."""
        averages = any(group.reduction == "mean" for group in phase.uploads)
        if len(self._sites) == 1 or self._defence.reduction != "mean" or not averages:
            return
        total = math.fsum(weights.values())
        for site, weight in weights.items():
            if weight > total / 2:
                tally.entries[site] = replace(tally.entries[site], share=weight / total)
                if site not in self._reported:
                    self._reported.add(site)
                    self._warn(phase, round_, site, majority(weight / total))

    def _warn(self, phase: Phase, round_: int, site: str, what: str) -> None:
        self._observer.warning(f"phase '{phase.name}', round {round_ + 1}: site {site} {what}")

    def _participants(self, phase: Phase, round_: int) -> tuple[tuple[SiteSpec, ...], dict[str, str]]:
        """Choose the sites of a round, in their fixed order, with the reason for each absent site."""
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
            draw = generator(self._environment.seed, phase.name, round_, "", "participation")
            drawn = set(torch.randperm(len(able), generator=draw)[:count].tolist())
            absent |= {site.name: "not drawn" for index, site in enumerate(able) if index not in drawn}
        return tuple(site for site in able if site.name not in absent), absent

    def _tasks(
        self,
        step: int,
        phase: Phase,
        round_: int,
        server: Memory,
        checkpoint: RunCheckpoint | None,
        sites: Sequence[SiteSpec],
    ) -> tuple[list[Task], dict[str, Mapping[str, State]]]:
        """Write the downloads and build the sites' tasks, with what each site downloads by group."""
        files: dict[_Key, Path] = {}
        kept: list[State] = []  # keeps the tensors alive, so that an id is never reused
        tasks: list[Task] = []
        sent: dict[str, Mapping[str, State]] = {}
        declared = sorted(group.name for group in phase.downloads)
        for index, site in enumerate(sites):
            states = phase.broadcast(server, site.name)
            if sorted(states) != declared:
                raise AlgorithmError(
                    f"phase '{phase.name}': declared the downloads {declared}, made {sorted(states)}"
                )
            downloads: dict[str, Path] = {}
            for name, state in states.items():
                key = _key(state)
                if key not in files:
                    kept.append(state)
                    files[key] = self._exchange / f"down-{len(kept)}"
                    write_tensors(files[key], state)
                downloads[name] = files[key]
            sent[site.name] = states
            # The pool runs at most `window` tasks ahead, so this many upload files are enough, unless the
            # defence needs all of them together.
            place = index if self._defence.needs_all else index % self._pool.window
            upload = self._exchange / f"up-{place}"
            slot = checkpoint.site_slots.get(site.name) if checkpoint else None
            to = free_slot(checkpoint, site.name)
            tasks.append(Task(site.name, step, round_, downloads, slot, to=to, upload=upload))
        return tasks, sent


def _key(state: State) -> _Key:
    """Return a key that is equal for states that hold the same tensor objects under the same names."""
    return tuple((name, id(tensor)) for name, tensor in state.items())


def _most_weight(size: SiteSize, announced: float | None) -> float:
    """Return the largest weight of a site: its training images, and its weight in the phase's first round.

    A mean in which all sites count alike has the weight 1.
    """
    images = math.inf if size.images is None else max(float(size.images), 1.0)
    return min(images, math.inf if announced is None else announced)


def _noises(phase: Phase, site: SiteSpec, sent: Mapping[str, State]) -> dict[str, float]:
    """Return, for the groups that a site noises, the norm that its update does not exceed for that."""
    found: dict[str, float] = {}
    for group in phase.uploads:
        noising = site.noising(group)
        if noising is not None and group.name in sent:
            values = sum(t.numel() for t in sent[group.name].values() if t.is_floating_point())
            found[group.name] = noising.largest_norm(values)
    return found


def _check_figures(phase: Phase, delivery: Delivery, size: SiteSize) -> None:
    """Check the numbers beside the tensors, which are shown, drawn and added up. Raises SiteFailed."""
    figures = (("weight", delivery.weight), ("seconds", delivery.seconds), *delivery.metrics.items())
    for name, value in figures:
        if abs(value) > _MOST:
            raise SiteFailed(
                f"site {delivery.site}: {name}: expected a magnitude of at most {_MOST:g}, found {value:g}"
            )
    try:
        phase.check(delivery.metrics, size)
    except ValueError as error:
        raise SiteFailed(f"site {delivery.site}: {error}") from error


def _take(
    phase: Phase,
    answer: Delivery | Failure,
    reducer: Reducer,
    sent: Mapping[str, State],
    size: SiteSize,
    noises: Mapping[str, float],
) -> Delivery:
    """Add a delivery to the round. Raises SiteFailed, or AlgorithmError when the method is at fault."""
    if isinstance(answer, Failure):
        raise AlgorithmError(answer.reason) if answer.fatal else SiteFailed(answer.reason)
    # Totals are computed from views; kept tensors must outlive the next overwrite of the file.
    kept = {group.name for group in phase.uploads if group.reduction in ("collect", "concat")}
    try:
        uploads = {name: read_tensors(path, copy=name in kept)[0] for name, path in answer.files.items()}
    except Exception as error:
        # Whatever a site sends, only the site fails.
        raise SiteFailed(f"site {answer.site}: its upload cannot be read ({type(error).__name__})") from error
    reducer.add(answer.site, uploads, answer.weight, answer.metrics, sent=sent, size=size, noises=noises)
    return answer


def _entry(delivery: Delivery, received: Mapping[str, int]) -> SiteEntry:
    sent = dict(delivery.sent)
    if delivery.metrics:
        sent["metrics"] = METRIC_BYTES * len(delivery.metrics)
    return SiteEntry(
        delivery.weight,
        delivery.metrics,
        sent,
        received,
        delivery.withheld,
        delivery.seconds,
        privacy=delivery.privacy,
    )
