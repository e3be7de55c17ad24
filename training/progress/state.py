"""State of a run for the displays, built from the engine's events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from training.algorithm import Phase, ServerStage
from training.engine.history import RoundEntry, SiteEntry

# Display names of the known metrics, in display order. Other metrics follow under their own names.
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
    """Return the column heading of a metric."""
    return METRICS.get(metric, metric.replace("_", " "))


@dataclass
class SiteState:
    """One site's row: its status, metrics by round, and bytes in both directions."""

    state: Literal["waiting", "working", "done", "dropped", "absent"] = "waiting"
    metrics: dict[str, list[float]] = field(default_factory=dict)
    bytes: int = 0
    seconds: float | None = None

    def last(self, metric: str) -> float | None:
        """Return the newest value of a metric."""
        values = self.metrics.get(metric)
        return values[-1] if values else None


def bytes_of(entry: SiteEntry) -> int:
    """Sum the bytes that a site sent and received in a round."""
    return sum(entry.sent.values()) + sum(entry.received.values())


class RunState:
    """Tracks a run. `clock` returns seconds from any starting point."""

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
        """Number of rounds and steps of the whole plan."""
        return sum(self.lengths.values())

    @property
    def done(self) -> int:
        """Number of finished rounds and steps, including those before a resumption."""
        before = 0
        for name, length in self.lengths.items():
            if name == self.phase:
                return before + self.round + (1 if self._finished else 0)
            before += length
        return 0

    @property
    def elapsed(self) -> float:
        """Seconds since the display started."""
        return self._clock() - self._started

    @property
    def left(self) -> float | None:
        """Estimated seconds left; None before the first round of the longest phase is finished.

        The estimate uses each phase's median time per round. Phases that have not started count as 0, because
        those before and after training are short.
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
        """The metrics received so far, in column order."""
        seen = {name for site in self.sites.values() for name in site.metrics}
        return [*(name for name in METRICS if name in seen), *sorted(seen - METRICS.keys())]

    def mean(self, metric: str) -> float | None:
        """Average a metric's newest values over the sites."""
        values = [v for site in self.sites.values() if (v := site.last(metric)) is not None]
        return statistics.fmean(values) if values else None

    def round_started(self, phase: str, round: int, rounds: int, sites: Sequence[str]) -> None:
        """Handle the start of a round."""
        self.phase, self.round, self.rounds, self._finished = phase, round, rounds, False
        self.lengths.setdefault(phase, rounds)
        self._round_started = self._clock()
        for name, site in self.sites.items():
            site.state = "working" if name in sites else "absent"
            site.seconds = None

    def site_finished(self, site: str, entry: SiteEntry) -> None:
        """Handle a site's delivery."""
        line = self.sites.setdefault(site, SiteState())
        line.state, line.seconds = "done", entry.seconds
        line.bytes += bytes_of(entry)
        _append(line.metrics, entry.metrics)

    def round_finished(self, entry: RoundEntry) -> None:
        """Handle the end of a round."""
        self._finished = True
        self._durations.setdefault(entry.phase, []).append(entry.seconds)
        for site in entry.dropped:
            self.sites.setdefault(site, SiteState()).state = "dropped"


def _append(series: dict[str, list[float]], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        series.setdefault(name, []).append(value)
