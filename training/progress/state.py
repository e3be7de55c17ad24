"""State of a run for the displays, built from the engine's events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from personalization.metrics import METRICS, Metric
from training.algorithm import Phase, Plan
from training.data.cases import few_patients
from training.engine.history import RoundEntry, SiteEntry, is_final

# The model that a score is of, by what its name begins with.
PREFIXES = {
    "val_": "",
    "joined_val_": "joined ",
    "local_val_": "local ",
    "cluster_val_": "cluster ",
    "personal_val_": "own ",
}
_OTHERS = {"key_entropy": "key entropy", "dead_keys": "dead keys", "personal_share": "kept of own training"}


def measured(name: str) -> tuple[str, Metric] | None:
    """Split `val_dice` into its prefix, a key of `PREFIXES`, and its metric; None for another name."""
    for prefix in PREFIXES:
        if name.startswith(prefix) and (metric := name.removeprefix(prefix)) in METRICS:
            return prefix, METRICS[metric]
    return None


def in_order(seen: Collection[str]) -> list[str]:
    """Names in the order of columns: the loss, the scores metric by metric, the others."""
    scores = [f"{prefix}{metric}" for metric in METRICS for prefix in PREFIXES]
    known = ["loss", *scores, *_OTHERS]
    return [*(name for name in known if name in seen), *sorted(set(seen).difference(known))]


def heading(name: str) -> str:
    """Return the column heading of a metric."""
    if (found := measured(name)) is not None:
        return f"{PREFIXES[found[0]]}{found[1].title}"
    return _OTHERS.get(name, name.replace("_", " "))


@dataclass
class SiteState:
    """One site's row: its status, metrics by round, and bytes in both directions.

    `batches` are those done in this round, and those planned, of a hospital on a network that says so.
    """

    state: Literal["waiting", "working", "done", "dropped", "absent"] = "waiting"
    metrics: dict[str, list[float]] = field(default_factory=dict)
    bytes: int = 0
    seconds: float | None = None
    batches: tuple[int, int] | None = None

    def last(self, metric: str) -> float | None:
        """Return the newest value of a metric."""
        values = self.metrics.get(metric)
        return values[-1] if values else None


@dataclass(frozen=True)
class Afterwards:
    """What follows the runs of a plan: its one long phase takes `times` as long as a round of `like`."""

    phase: str
    like: str
    times: float


def is_score(metric: str) -> bool:
    """Whether a metric is a score of patients or images."""
    return measured(metric) is not None


def bytes_of(entry: SiteEntry) -> int:
    """Sum the bytes that a site sent and received in a round."""
    return sum(entry.sent.values()) + sum(entry.received.values())


class RunState:
    """Tracks a run.

    `clock` returns seconds from any starting point. `expected` has the seconds of one round of every
    phase that was forecast; the first round that is measured replaces them. `validated` has each site's
    number of validation patients. `place` is this run's among several of one plan, as (3, 5) of a federation
    that practises, and `then` has what follows them, by name. `following` are the seconds of it that the runs
    before this one told.
    """

    def __init__(
        self,
        title: str,
        plan: Plan,
        sites: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        expected: Mapping[str, float] | None = None,
        validated: Mapping[str, int] | None = None,
        place: tuple[int, int] = (1, 1),
        then: Mapping[str, Afterwards] = MappingProxyType({}),
        following: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._few = {site: few_patients(count) for site, count in (validated or {}).items()}
        self.title = title
        self.sites = {site: SiteState() for site in sites}
        self.phase = ""
        self.round = 0
        self.rounds = 0
        self.lengths = {step.name: step.rounds if isinstance(step, Phase) else step.steps for step in plan}
        self.place, self.then = place, dict(then)
        self._following = dict(following)
        self._expected = dict(expected or {})
        self._durations: dict[str, list[float]] = {}
        self._clock = clock
        self._started = clock()
        self._round_started = clock()
        self._finished = False

    @property
    def total(self) -> int:
        """Number of rounds and steps of the whole plan, in all its runs."""
        return sum(self.lengths.values()) * self.place[1]

    @property
    def done(self) -> int:
        """Number of finished rounds and steps, including those before a resumption and of earlier runs."""
        return sum(self.lengths.values()) * (self.place[0] - 1) + self._done

    @property
    def _done(self) -> int:
        """Those of this run."""
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
    def running(self) -> bool:
        """Whether a round has started and not ended."""
        return self.rounds > 0 and not self._finished

    @property
    def since_round(self) -> float:
        """Seconds since the present round started."""
        return self._clock() - self._round_started

    @property
    def left(self) -> float | None:
        """Estimated seconds left; None where no phase ahead has a round that was measured or forecast.

        The estimate uses each phase's median time per round. It leaves out the phases of `unknown`.
        """
        ahead = self._ahead()
        known = {name: seconds for name in ahead if (seconds := self._seconds(name)) is not None}
        following = self.following
        if not known and not following:
            return None
        left = sum(ahead[name] * seconds for name, seconds in known.items()) + sum(following.values())
        if not self._finished:
            # A round that takes longer than expected leaves the other rounds their time.
            left -= min(self.since_round, known.get(self.phase, 0.0))
        return left

    @property
    def unknown(self) -> list[str]:
        """The phases ahead without a round that was measured or forecast."""
        phases = [name for name in self._ahead() if self._seconds(name) is None]
        return [*phases, *(name for name in self.then if name not in self.following)]

    @property
    def following(self) -> dict[str, float]:
        """Seconds of what follows the runs. Those with fewer sites are quicker: the longest counts."""
        told = {name: self._seconds(each.like) for name, each in self.then.items()}
        here = {
            name: self.then[name].times * seconds for name, seconds in told.items() if seconds is not None
        }
        return {
            name: max(here.get(name, 0.0), self._following.get(name, 0.0))
            for name in self.then
            if name in here or name in self._following
        }

    @property
    def measured(self) -> dict[str, float]:
        """Seconds of one round of every phase that was measured or forecast."""
        known = ((name, self._seconds(name)) for name in self.lengths)
        return {name: seconds for name, seconds in known if seconds is not None}

    def _ahead(self) -> dict[str, int]:
        """Unfinished rounds of every phase that has some, in the plan's order; later runs have them all."""
        ahead, done, later = {}, self._done, self.place[1] - self.place[0]
        for name, length in self.lengths.items():
            if rounds := max(0, length - done) + later * length:
                ahead[name] = rounds
            done = max(0, done - length)
        return ahead

    def _seconds(self, phase: str) -> float | None:
        """Time of one round of a phase, measured or else forecast."""
        if phase in self._durations:
            return statistics.median(self._durations[phase][-9:])
        return self._expected.get(phase)

    @property
    def metrics(self) -> list[str]:
        """The metrics received so far, in column order."""
        seen = {name for site in self.sites.values() for name in site.metrics if not is_final(name)}
        return in_order(seen)

    def mean(self, metric: str) -> float | None:
        """Average a metric's newest values over the sites."""
        values = [v for site in self.sites.values() if (v := site.last(metric)) is not None]
        return statistics.fmean(values) if values else None

    def basis(self, site: str, metric: str) -> str:
        """Say how few patients a site's score rests on; empty of three or more, and of other metrics."""
        few = self._few.get(site, "")
        return f" of {few}" if few and is_score(metric) else ""

    def round_started(self, phase: str, round: int, rounds: int, sites: Sequence[str]) -> None:
        """Handle the start of a round."""
        self.phase, self.round, self.rounds, self._finished = phase, round, rounds, False
        self.lengths.setdefault(phase, rounds)
        self._round_started = self._clock()
        for name, site in self.sites.items():
            site.state = "working" if name in sites else "absent"
            site.seconds = site.batches = None

    def site_working(self, site: str, done: int, planned: int) -> None:
        """Handle what a site says of its step."""
        if (line := self.sites.get(site)) is not None and planned:
            line.batches = done, planned

    def left_of(self, site: str) -> float | None:
        """Estimated seconds that a site's step takes yet; None where it does not say."""
        batches = self.sites[site].batches
        if batches is None or not batches[0]:
            return None
        done, planned = batches
        return self.since_round * max(0, planned - done) / done

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
