"""Where a run stands, gathered from what the engine tells; what displays show."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from training.algorithm import Phase, ServerStage
from training.engine.history import RoundEntry, SiteEntry

# The known metrics in the order and by the names a person reads them; others follow under their own.
METRICS = {
    "loss": "loss",
    "val_dice": "Dice",
    "joined_val_dice": "joined Dice",
    "personal_val_dice": "own Dice",
    "val_accuracy": "accuracy",
    "local_val_accuracy": "local accuracy",
    "cluster_val_accuracy": "cluster accuracy",
    "personal_val_accuracy": "own accuracy",
    "key_entropy": "key entropy",
    "dead_keys": "dead keys",
}


def heading(metric: str) -> str:
    """A metric as a column is headed."""
    return METRICS.get(metric, metric.replace("_", " "))


@dataclass
class SiteState:
    """One site's line: its metrics round by round, the bytes both ways, and what it does."""

    state: Literal["waiting", "working", "done", "dropped", "absent"] = "waiting"
    metrics: dict[str, list[float]] = field(default_factory=dict)
    bytes: int = 0
    seconds: float | None = None

    def last(self, metric: str) -> float | None:
        """The newest value of a metric."""
        values = self.metrics.get(metric)
        return values[-1] if values else None


def bytes_of(entry: SiteEntry) -> int:
    """Everything that travelled for a site in a round, both ways."""
    return sum(entry.sent.values()) + sum(entry.received.values())


class RunState:
    """Follows a run. `clock` gives seconds and need not start anywhere."""

    def __init__(
        self,
        title: str,
        plan: Sequence[Phase | ServerStage],
        sites: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title
        self.sites = {site: SiteState() for site in sites}
        self.phase = ""
        self.round = 0
        self.rounds = 0
        self.lengths = {step.name: step.rounds if isinstance(step, Phase) else step.steps for step in plan}
        self._durations: dict[str, list[float]] = {}
        self._clock = clock
        self._started = clock()
        self._round_started = clock()
        self._finished = False

    @property
    def total(self) -> int:
        """Rounds and steps of the whole plan."""
        return sum(self.lengths.values())

    @property
    def done(self) -> int:
        """Rounds and steps that are over, those of a run that was resumed included."""
        before = 0
        for name, length in self.lengths.items():
            if name == self.phase:
                return before + self.round + (1 if self._finished else 0)
            before += length
        return 0

    @property
    def elapsed(self) -> float:
        """Seconds since the display began."""
        return self._clock() - self._started

    @property
    def left(self) -> float | None:
        """About how many seconds are left; None before a round of the longest phase is over.

        A phase takes its own median time per round. One that was not seen yet counts for nothing: what comes
        before and after training is short beside it.
        """
        longest = max(self.lengths, key=self.lengths.__getitem__, default="")
        if longest not in self._durations:
            return None
        seconds, names = 0.0, list(self.lengths)
        for name in names[names.index(self.phase) :]:
            rounds = self.lengths[name]
            if name == self.phase:
                rounds -= self.round + (1 if self._finished else 0)
            seconds += rounds * statistics.median(self._durations.get(name, [0.0])[-9:])
        if not self._finished:
            seconds -= self._clock() - self._round_started
        return max(0.0, seconds)

    @property
    def metrics(self) -> list[str]:
        """The metrics seen so far, in the order of their columns."""
        seen = {name for site in self.sites.values() for name in site.metrics}
        return [*(name for name in METRICS if name in seen), *sorted(seen - METRICS.keys())]

    def mean(self, metric: str) -> float | None:
        """Mean over the sites of a metric's newest values."""
        values = [v for site in self.sites.values() if (v := site.last(metric)) is not None]
        return statistics.fmean(values) if values else None

    def round_started(self, phase: str, round: int, rounds: int, sites: Sequence[str]) -> None:
        """As the engine tells it."""
        self.phase, self.round, self.rounds, self._finished = phase, round, rounds, False
        self.lengths.setdefault(phase, rounds)
        self._round_started = self._clock()
        for name, site in self.sites.items():
            site.state = "working" if name in sites else "absent"
            site.seconds = None

    def site_finished(self, site: str, entry: SiteEntry) -> None:
        """As the engine tells it."""
        line = self.sites.setdefault(site, SiteState())
        line.state, line.seconds = "done", entry.seconds
        line.bytes += bytes_of(entry)
        _append(line.metrics, entry.metrics)

    def round_finished(self, entry: RoundEntry) -> None:
        """As the engine tells it."""
        self._finished = True
        self._durations.setdefault(entry.phase, []).append(entry.seconds)
        for site in entry.dropped:
            self.sites.setdefault(site, SiteState()).state = "dropped"


def _append(series: dict[str, list[float]], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        series.setdefault(name, []).append(value)
