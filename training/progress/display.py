"""The two progress displays (live table, plain lines), and the choice between them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from statistics import fmean
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from personalization.metrics import METRICS
from training.algorithm import Plan
from training.data.cases import FEW_CASES, FEW_PATIENTS
from training.engine.history import (
    FinalChange,
    FinalScore,
    Observer,
    RoundEntry,
    SiteEntry,
    final_changes,
    final_scores,
)
from training.progress import format
from training.progress.state import PREFIXES, Afterwards, RunState, bytes_of, heading

# The score that the sparklines show: the first of these that a run has.
_TREND = ("personal_val_", "joined_val_", "val_")
# With more sites than this, a line gives the range of values instead of each site's.
_NAMED_SITES = 5
# Between the lines of a long round, where output is no terminal.
_REMIND_SECONDS = 60.0
# Which model a score of the end is of, as its column would be called.
_OF = {"": "", "cluster": PREFIXES["cluster_val_"].strip(), "personal": PREFIXES["personal_val_"].strip()}

NOTHING: Mapping[str, Afterwards] = MappingProxyType({})

_MARKS = {
    "waiting": Text("·", style="dim"),
    "working": Text("working", style="cyan"),
    "dropped": Text("dropped", style="bold red"),
    "absent": Text("absent", style="dim"),
}


class Progress(Observer, Protocol):
    """The interface of a display: the engine's events, and those of the command."""

    def run_started(
        self,
        title: str,
        plan: Plan,
        sites: Sequence[str],
        expected: Mapping[str, float] | None = None,
        validated: Mapping[str, int] | None = None,
        place: tuple[int, int] = (1, 1),
        then: Mapping[str, Afterwards] = NOTHING,
    ) -> None:
        """Handle the start or the resumption of a run; see `RunState` for the last four. A run that is not
        the first of several is expected to take as long as those before it, and what follows them, which is
        started by its name, as long as they told.
        """

    def site_working(self, site: str, done: int, planned: int) -> None:
        """Handle what a hospital on a network says of its step: batches done, of those planned."""

    def published(self, reference: str, digest: str) -> None:
        """Handle the publication of an artefact."""

    def __enter__(self) -> Self:
        """Start the display."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the display and leave the last state visible."""


class _Display:
    """Base of both displays: keeps the state, and prints warnings and publications."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state: RunState | None = None
        self._told: tuple[str, ...] = ()  # the phases of unknown length that a line named

    @property
    def state(self) -> RunState:
        """State of the run. Raises RuntimeError before `run_started`."""
        if self._state is None:
            raise RuntimeError("no run to display; call run_started first")
        return self._state

    def run_started(
        self,
        title: str,
        plan: Plan,
        sites: Sequence[str],
        expected: Mapping[str, float] | None = None,
        validated: Mapping[str, int] | None = None,
        place: tuple[int, int] = (1, 1),
        then: Mapping[str, Afterwards] = NOTHING,
    ) -> None:
        """Handle the start or the resumption of a run."""
        before = self._state
        self._told = ()
        following: Mapping[str, float] = {}
        if before is not None and place[0] > 1:
            expected = {**before.measured, **(expected or {})}
            following = before.following
        elif before is not None and title in before.following:
            expected = {before.then[title].phase: before.following[title]}
        self._state = RunState(
            title,
            plan,
            sites,
            expected=expected,
            validated=validated,
            place=place,
            then=then,
            following=following,
        )

    def round_started(self, phase: str, round: int, rounds: int, sites: tuple[str, ...]) -> None:
        """Handle the start of a round."""
        self.state.round_started(phase, round, rounds, sites)

    def site_working(self, site: str, done: int, planned: int) -> None:
        """Handle what a hospital on a network says of its step: batches done, of those planned."""
        self.state.site_working(site, done, planned)

    def site_finished(self, phase: str, round: int, site: str, entry: SiteEntry) -> None:  # noqa: ARG002
        """Handle a site's delivery."""
        self.state.site_finished(site, entry)

    def round_finished(self, entry: RoundEntry) -> None:
        """Handle the end of a round."""
        self.state.round_finished(entry)

    def warning(self, message: str) -> None:
        """Print a warning."""
        self._console.print(f"[bold yellow]warning[/] {escape(message)}", highlight=False, soft_wrap=True)

    def note(self, message: str) -> None:
        """Print what a person should know, and need not act on."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)

    def published(self, reference: str, digest: str) -> None:
        """Print an artefact's reference and digest."""
        line = f"[bold green]published[/] [bold]{escape(reference)}[/]  [dim]{escape(digest)}[/]"
        self._console.print(line, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


class PlainProgress(_Display):
    """Prints one line per round, for logs and pipes, and one per minute within a long round."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._remind, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Print no more lines."""
        self._over.set()
        self._watch.join()

    def _remind(self) -> None:
        while not self._over.wait(_REMIND_SECONDS):
            if self._state is not None and self._state.since_round >= _REMIND_SECONDS:
                self.still_running()

    def still_running(self) -> None:
        """Print a line about the present round: its time so far, its sites, and the time left."""
        state = self.state
        if not state.running:
            return
        parts = [" ".join(filter(None, (_run(state), f"{state.phase} {state.round + 1}/{state.rounds}")))]
        parts.append(f"running for {format.duration(state.since_round)}")
        for what in ("done", "working", "dropped"):
            names = [name for name, site in state.sites.items() if site.state == what]
            if names:
                named = [f"{name}{_batches(state, name, what)}" for name in names]
                shown = ", ".join(named) if len(names) <= _NAMED_SITES else f"{len(names)} sites"
                parts.append(f"{what}: {shown}")
        if time := _time(state, "left", self._told):
            parts.append(time)
        self._line("  ".join(parts))

    @override
    def run_started(
        self,
        title: str,
        plan: Plan,
        sites: Sequence[str],
        expected: Mapping[str, float] | None = None,
        validated: Mapping[str, int] | None = None,
        place: tuple[int, int] = (1, 1),
        then: Mapping[str, Afterwards] = NOTHING,
    ) -> None:
        """Print the title, the sites, the number of rounds of every phase, and the time that was forecast."""
        super().run_started(title, plan, sites, expected, validated, place, then)
        lengths = ", ".join(f"{name} {length}" for name, length in self.state.lengths.items())
        parts = [f"{title}: {len(sites)} sites ({', '.join(sites)})", f"rounds: {lengths}"]
        if run := _run(self.state):
            parts.append(", then ".join((run, *then)))
        if time := _time(self.state, "in all"):
            parts.append(f"about {time}")
        self._line("; ".join(parts))

    @override
    def round_finished(self, entry: RoundEntry) -> None:
        """Print one line: each metric with its mean and range, bytes, time. Scores of the end follow it."""
        super().round_finished(entry)
        state, parts = self.state, [f"{entry.phase} {entry.round + 1}/{entry.rounds}"]
        for metric in state.metrics:
            here = {name: site.metrics.get(metric) for name, site in entry.sites.items()}
            found = {k: v for k, v in here.items() if v is not None}
            parts += _summary(heading(metric), found, {k: state.basis(k, metric) for k in found})
        if entry.deliveries:
            parts.append(format.size(sum(map(bytes_of, entry.deliveries.values()))))
        parts.append(f"{entry.seconds:.1f} s")
        if time := _time(state, "left", self._told):
            parts.append(time)
        self._told = tuple(state.unknown)
        self._line("  ".join(parts))
        for line in (*_withheld(entry), *_finals(entry)):
            self._line(f"  {line}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class RichProgress(_Display):
    """Shows a live table of the sites below a progress bar of the rounds."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the screen."""
        self._live.stop()

    @override
    def round_finished(self, entry: RoundEntry) -> None:
        """Print the scores that are taken once above the table, which shows those of rounds."""
        super().round_finished(entry)
        for line in (*_withheld(entry), *_finals(entry)):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def render(self) -> Group | Text:
        """Render the current state."""
        if self._state is None:
            return Text("")
        return Group(Text(""), self._head(self._state), Text(""), self._sites(self._state))

    @staticmethod
    def _head(state: RunState) -> Table:
        grid = Table.grid(padding=(0, 2))
        over = state.done >= state.total
        where = f"{state.phase} {state.round + 1}/{state.rounds}" if state.rounds else ""
        where = "  ".join(filter(None, (_run(state), where)))
        grid.add_row(
            Text(state.title, style="bold"),
            Text("done" if over else where),
            ProgressBar(total=max(state.total, 1), completed=state.done, width=32),
            Text(format.duration(state.elapsed), style="dim"),
            Text(_time(state, "left"), style="cyan"),
        )
        return grid

    @staticmethod
    def _sites(state: RunState) -> Table:
        metrics = state.metrics
        names = (f"{prefix}{metric}" for prefix in _TREND for metric in METRICS)
        trend = next((name for name in names if name in metrics), None)
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), show_footer=len(state.sites) > 1)
        table.add_column("site", footer=Text("mean", style="dim"), min_width=8)
        for metric in metrics:
            footer = Text(format.number(state.mean(metric)), style="dim")
            table.add_column(heading(metric), footer=footer, justify="right", min_width=6)
        if trend:
            table.add_column("trend", min_width=16)
        traffic = format.size(sum(site.bytes for site in state.sites.values()))
        table.add_column("traffic", footer=Text(traffic, style="dim"), justify="right", min_width=8)
        table.add_column("this round", min_width=10)
        for name, site in state.sites.items():
            cells: list[Text | str] = [Text(name, style="bold")]
            for metric in metrics:
                value = site.last(metric)
                cells.append(format.number(value) + (state.basis(name, metric) if value is not None else ""))
            if trend:
                cells.append(Text(format.sparkline(site.metrics.get(trend, ())), style="green"))
            cells.append(format.size(site.bytes))
            took = f"{site.seconds:.1f} s" if site.seconds is not None else ""
            mark = _MARKS.get(site.state, Text(took, style="dim"))
            cells.append(mark + _batches(state, name, site.state))
            table.add_row(*cells)
        return table


def _batches(state: RunState, site: str, status: str) -> str:
    """How far a site's step is, for a line that names the site; empty where it does not say."""
    batches = state.sites[site].batches
    if status != "working" or batches is None:
        return ""
    left = state.left_of(site)
    return f" ({batches[0]} of {batches[1]} batches" + (f", {format.duration(left)} left)" if left else ")")


def _run(state: RunState) -> str:
    """Say which run of several this is; empty for a single one."""
    number, runs = state.place
    return f"run {number} of {runs}" if runs > 1 else ""


def _time(state: RunState, what: str, told: Sequence[str] = ()) -> str:
    """Format the time left, and name the phases that it does not count; empty where nothing is known.

    Where a line before named the same phases (`told`), it is at least that time.
    """
    if state.left is None or (state.unknown and round(state.left) == 0):
        return ""
    time = f"{format.duration(state.left)} {what}"
    if not state.unknown:
        return time
    if [*told] == state.unknown:
        return f"at least {time}"
    return f"{time}, not counting {', '.join(state.unknown)}"


def _withheld(entry: RoundEntry) -> list[str]:
    """Say which groups stayed at which sites by their policies."""
    sites: dict[str, list[str]] = {}
    for site, part in entry.sites.items():
        for group in part.withheld:
            sites.setdefault(group, []).append(site)
    return [f"{group} withheld by {', '.join(names)}" for group, names in sites.items()]


def _finals(entry: RoundEntry) -> list[str]:
    """Format the scores of the end. That of a label is left out where the mean over labels says the same."""
    scores = final_scores([entry])
    means = {(score.model, score.split): score.sites for score in scores if not score.label}
    shown = [_final(s) for s in scores if not s.label or means.get((s.model, s.split)) != s.sites]
    return [*shown, *(_change(change) for change in final_changes([entry]) if not change.label)]


def _change(change: FinalChange) -> str:
    """Format what a model changes on the same patients, and between what it is with 95 % certainty."""
    found = change.together
    if found is None:
        return ""
    of = f"{_OF[change.model]} minus {_OF[change.base] or 'shared'}, same patients:"
    bounds = f" ({found.low:+.3f} to {found.high:+.3f})" if found.low is not None else ""
    return f"{of} {found.change:+.3f}{bounds} {_patients(found.count)}"


def _final(score: FinalScore) -> str:
    """Format a score that is taken once: its mean, n, and each site's."""
    split = {"test": "test", "val": "validation"}[score.split]
    name = " ".join(filter(None, (_OF[score.model], split, score.label)))
    counts = {n for _, n in score.sites.values()}
    alike = len(counts) == 1 < len(score.sites)
    sites = ", ".join(
        f"{site} {format.number(mean)}" + ("" if alike else f" {_patients(n)}")
        for site, (mean, n) in score.sites.items()
    )
    sites += f", each {_patients(counts.pop())}" if alike else ""
    detail = f" ({sites})" if len(score.sites) <= _NAMED_SITES else ""
    return f"{name} {format.number(score.mean)} {_patients(score.count)}{detail}"


def _patients(count: int) -> str:
    return f"n={count}, few" if count < FEW_CASES else f"n={count}"


def _summary(name: str, values: Mapping[str, float], basis: Mapping[str, str]) -> list[str]:
    """Format one metric of a round: its mean, and each site's value or, with many sites, the range.

    `basis` says of a site's score that it rests on few patients.
    """
    if not values:
        return []
    if len(values) <= _NAMED_SITES:
        of = set(basis.values())
        alike = of.pop() if len(values) > 1 and len(of) == 1 else ""
        detail = ", ".join(
            f"{site} {format.number(value)}{'' if alike else basis[site]}" for site, value in values.items()
        )
        if alike:
            detail += f", each{alike}"
    else:
        detail = f"{format.number(min(values.values()))} to {format.number(max(values.values()))}"
        if few := sum(map(bool, basis.values())):
            detail += f", {few} of fewer than {FEW_PATIENTS} patients"
    return [f"{name} {format.number(fmean(values.values()))} ({detail})"]


def open_progress(console: Console | None = None) -> PlainProgress | RichProgress:
    """Choose the display for the console. Use it as a context manager."""
    console = console or Console()
    return RichProgress(console) if console.is_terminal else PlainProgress(console)
