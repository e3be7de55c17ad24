"""The watch over a hospital's answers, the masks to be looked at, and what was observed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from locum.answers import Alarm, Observation, Watch, write_whole
from locum.client import Client
from locum.commands.deciding import actor_of
from locum.commands.exit_codes import DONE, FAILED
from locum.commands.terminal import Terminal, aligned

_console = Terminal(highlight=False, soft_wrap=True, markup=False)
# Answers by which the models of a hospital are known.
_NEWEST = 500
_TIME = "%Y-%m-%d %H:%M"


def show_watches(hospital: str | None, as_json: bool) -> int:
    """Print the watches; return 1 where one is to be investigated. Raises LocumError."""
    with Client() as client:
        found = client.watches(hospital)
    _print(found, as_json)
    return FAILED if any(each.state == "investigate" for each in found) else DONE


def answer(hospital: str, model: str, scanner: str | None, reason: str, actor: str | None) -> None:
    """Answer the alarms of a scanner. Raises LocumError."""
    with Client() as client:
        found = client.answer_alarms(hospital, model, reason, scanner=scanner, actor=actor_of(client, actor))
    _print(found, False)


def set_rule(hospital: str, model: str, months: float, stop: str, reason: str, actor: str | None) -> None:
    """Set how often false alarms may be, and what happens at one. Raises LocumError."""
    with Client() as client:
        client.set_watch(hospital, model, reason, months=months, stop=stop, actor=actor_of(client, actor))
    _console.print(
        f"{model} at {hospital}: one false alarm in {months:g} months; at an alarm: {stop}. Reason: {reason}"
    )


def show_review(hospital: str, model: str | None, limit: int, as_json: bool) -> int:
    """Print the masks to look at, the most doubtful first. Raises LocumError."""
    with Client() as client:
        models = (
            [model]
            if model
            else sorted({each.model for each in client.observations(hospital, limit=_NEWEST)})
        )
        found = [each for name in models for each in client.review(hospital, name, limit)]
    found = sorted(found, key=doubt)[:limit]
    if as_json:
        _say_json([each.raw for each in found])
        return DONE
    header = ("less sure", "label", "confidence", "model", "scanner", "at", "request", "looked at by")
    none = ["no answers of the versions that serve this hospital were observed yet"]
    for line in aligned([header, *map(_doubtful, found)]) if found else none:
        _console.print(line)
    return DONE


def save_observations(hospital: str, model: str | None, out: Path) -> None:
    """Save the CSV of what was observed. Raises LocumError, OSError."""
    with Client() as client:
        content = client.observations_csv(hospital, model)
    write_whole(out, content)
    rows = max(content.count(b"\n") - 1, 0)
    _console.print(f"{out}: {rows} rows, one per answer and label")


def doubt(answer: Observation) -> tuple[bool, float]:
    """Sort answers as the service does: by the rank of the least sure label, those looked at last."""
    return answer.looked_at is not None, min((answer.review or {}).values(), default=1.0)


def _doubtful(answer: Observation) -> tuple[str, ...]:
    ranks = answer.review or {}
    # Without ranks, among too few answers, the confidences say which label is the least sure.
    doubts = ranks or {label: seen.confidence for label, seen in answer.labels.items()}
    least = min(doubts, key=doubts.__getitem__) if doubts else None
    return (
        f"{100 * ranks[least]:.0f} %" if least in ranks else "-",
        least or "-",
        "-" if least is None else f"{answer.labels[least].confidence:.3f}",
        answer.model,
        answer.scanner or "-",
        f"{answer.at:{_TIME}}",
        answer.request,
        answer.looked_by or "-",
    )


def _print(watches: Sequence[Watch], as_json: bool) -> None:
    if as_json:
        _say_json([each.raw for each in watches])
        return
    header = ("hospital", "model", "scanner", "state", "since", "alarms", "price")
    for line in aligned([header, *map(_row, watches)]) if watches else ["nothing is watched yet"]:
        _console.print(line)


def _row(watch: Watch) -> tuple[str, ...]:
    learns = f"learns what is usual: {watch.answers} answers so far" if watch.learning else "-"
    return (
        watch.hospital,
        watch.model,
        watch.scanner or "-",
        watch.state,
        "-" if watch.since is None else f"{watch.since:{_TIME}}",
        "; ".join(map(in_words, watch.alarms)) or learns,
        watch.price or "-",
    )


def in_words(alarm: Alarm) -> str:
    """What a person reads of an alarm."""
    if alarm.stream == "silence":
        return "nothing arrives"
    if alarm.stream == "warned":
        return "the guard warns more often"
    if alarm.stream.startswith("no "):
        return f"more answers have {alarm.stream}"
    return f"{alarm.stream} is {'higher' if alarm.up else 'lower'}"


def _say_json(found: Iterable[Any]) -> None:
    # ASCII alone: no name moves the cursor.
    _console.out(json.dumps(list(found), indent=2), highlight=False)
