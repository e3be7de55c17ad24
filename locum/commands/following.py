"""Follow a job's events: a live display at a terminal, one line per event elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from locum.commands.terminal import plain
from locum.errors import AnswerInvalid

# A job makes its candidate in one of these stages: it adapts without masks, by a dose that it measures where
# no recipe is named; learns from masks; or compares models.
LEARNING = ("adapting", "measuring", "joining", "fitting", "comparing")
_STEPS = "▁▂▃▄▅▆▇█"
_BAR = 20
# Only the latest epochs are drawn, so that a line fits a terminal of 80 columns.
_DRAWN = 12


class Followed:
    """The state of a job, from the events so far."""

    def __init__(self) -> None:
        self.state = "queued"
        self.learning = LEARNING[0]
        self.progress: dict[str, Any] = {}
        self.epochs: list[dict[str, Any]] = []
        self.used: dict[str, float] = {}
        self._spinner = Spinner("dots", style="cyan")

    def take(self, event_type: str, data: dict[str, Any]) -> str | None:
        """Add an event; return a line about it, or None for an event without one.

        Raises AnswerInvalid for an event that Locum's service does not send.
        """
        try:
            return self._take(event_type, _plain(data))
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            raise AnswerInvalid(f"expected an event '{event_type}' of a job, found {data!r:.80}") from None

    def _take(self, event_type: str, data: dict[str, Any]) -> str | None:
        if event_type == "state":
            self.state = str(data["state"])
            return self.state
        if event_type == "progress":
            repeated = data["stage"] == self.progress.get("stage") and "against" not in data
            self.progress = data
            self.learning = data["stage"] if data["stage"] in LEARNING else self.learning
            return None if repeated else self._doing()
        if event_type == "epoch":
            self.epochs.append(data | {"epoch": int(data["epoch"])})
            self.used = _shares(data.get("coefficients")) or self.used
            return self._last_epoch()
        return str(data["message"]) if event_type == "warning" else None

    def _doing(self) -> str:
        against, left = self.progress.get("against"), self.progress.get("seconds_left")
        doing = f"{self.progress['stage']} against {against}" if against else str(self.progress["stage"])
        return doing if left is None else f"{doing}, about {left} s left"

    def _last_epoch(self) -> str:
        epoch = self.epochs[-1]
        # An adaptation reports `agreement`; a joining reports `dice` on its validation patients.
        formats = {"loss": ".4f", "agreement": ".2f", "dice": ".2f"}
        parts = [f"epoch {epoch['epoch']}"]
        parts += [
            f"{name} {epoch[name]:{form}}" for name, form in formats.items() if epoch.get(name) is not None
        ]
        return "  ".join(parts)

    def __rich__(self) -> Group:
        """Render stages, epochs, and the share of each model in the routed network."""
        return Group(self._stages(), self._learning())

    def _stages(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        now = self.progress.get("stage")
        stages = ("preparing", self.learning, "judging", "drawing", "publishing")
        over = self.state not in ("queued", "running", "cancelling")
        reached = stages.index(now) if now in stages else -1
        cells: list[Text | Spinner] = [Text("")]
        for index, stage in enumerate(stages):
            if index == reached and not over:
                self._spinner.update(text=Text(stage, style="bold cyan"))
                cells.append(self._spinner)
            elif index <= reached:
                cells.append(Text(f"✓ {stage}", style="green"))
            else:
                cells.append(Text(f"· {stage}", style="dim"))
        grid.add_row(*cells)
        return grid

    def _learning(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        if not self.epochs:
            return grid
        done, total = self.epochs[-1]["epoch"], self.progress.get("epochs")
        total = total if isinstance(total, int) and total > 0 else max(done, 1)
        bar = ProgressBar(total=total, completed=done, width=_BAR, complete_style="cyan")
        losses = [epoch["loss"] for epoch in self.epochs if _is_finite(epoch.get("loss"))]
        grid.add_row("", bar, Text(self._last_epoch()), Text(_curve(losses[-_DRAWN:]), style="green"))
        for model, share in self.used.items():
            part = ProgressBar(total=1, completed=share, width=_BAR, complete_style="magenta")
            grid.add_row("", part, Text(f"{share:4.0%} {model}"))
        if "against" in self.progress or "seconds_left" in self.progress:
            grid.add_row("", "", Text(self._doing(), style="dim"))
        return grid


def follow(console: Console, events: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Show the events until the job ends."""
    followed = Followed()
    if not console.is_terminal:
        for event in events:
            line = followed.take(*event)
            if line:
                console.print(f"  {line}", highlight=False, soft_wrap=True)
        return
    with Live(followed, console=console, refresh_per_second=8):
        for event in events:
            followed.take(*event)


def _plain(value: Any) -> Any:
    """An event's data of which no text moves the cursor."""
    if isinstance(value, dict):
        return {plain(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return plain(value) if isinstance(value, str) else value


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _shares(coefficients: dict[str, Any] | None) -> dict[str, float]:
    """Return the share of each model, the mean over the layers."""
    if coefficients is None:
        return {}
    layers = [[value / sum(layer) for value in layer] for layer in coefficients["values"]]
    return dict(zip(coefficients["models"], map(fmean, zip(*layers, strict=True)), strict=True))


def _curve(values: list[float]) -> str:
    """Draw values as small bars between the lowest and the highest."""
    low, high = min(values, default=0), max(values, default=0)
    scale = (len(_STEPS) - 1) / (high - low) if high > low else 0
    return "".join(_STEPS[round((value - low) * scale)] for value in values)
