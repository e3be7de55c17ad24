"""The watch over a hospital's answers, the masks to be looked at, and what was observed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locum.answers import Alarm, Observation, Watch, write_whole
from locum.client import Client
from locum.commands.deciding import actor_of
from locum.commands.exit_codes import DONE, FAILED
from locum.commands.terminal import Terminal, aligned

_console = Terminal(highlight=False, soft_wrap=True, markup=False)
# Answers that a rank is among, the newest, and how many there must be: as the service ranks.
_AMONG, _FEWEST = 500, 20
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
    """Print a hospital's newest answers, the most doubtful first. Raises LocumError."""
    with Client() as client:
        found = ranked(client.observations(hospital, model, limit=_AMONG))[:limit]
    if as_json:
        _say_json([{**each.answer.raw, "label": each.label, "review": each.rank} for each in found])
        return DONE
    rows = [
        (
            "-" if each.rank is None else f"{100 * each.rank:.0f} %",
            each.label or "-",
            "-" if each.label is None else f"{each.answer.labels[each.label].confidence:.3f}",
            each.answer.model,
            each.answer.scanner or "-",
            f"{each.answer.at:{_TIME}}",
            each.answer.request,
        )
        for each in found
    ]
    header = ("less sure", "label", "confidence", "model", "scanner", "at", "request")
    for line in aligned([header, *rows]) if rows else ["no answers of this hospital were observed yet"]:
        _console.print(line)
    return DONE


def save_observations(hospital: str, model: str | None, out: Path) -> None:
    """Save the CSV of what was observed. Raises LocumError, OSError."""
    with Client() as client:
        content = client.observations_csv(hospital, model)
    write_whole(out, content)
    rows = max(content.count(b"\n") - 1, 0)
    _console.print(f"{out}: {rows} rows, one per answer and label")


@dataclass(frozen=True)
class Ranked:
    """An answer, its least sure label, and which share of its version's answers was less sure.

    `rank` is None among too few answers, and `label`, too, of an answer that was sure of nothing.
    """

    answer: Observation
    label: str | None
    rank: float | None


def ranked(answers: Sequence[Observation]) -> list[Ranked]:
    """Rank answers by their least sure label among the others of their version, the most doubtful first.

    Those that have no rank come last; equal ones are newest first.
    """
    confidences: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in answers:
        for label, seen in each.labels.items():
            confidences[each.version, label].append(seen.confidence)
    found = []
    for each in answers:
        ranks = {
            label: rank(seen.confidence, confidences[each.version, label])
            for label, seen in each.labels.items()
        }
        known = {label: of for label, of in ranks.items() if of is not None}
        doubts = known or {label: seen.confidence for label, seen in each.labels.items()}
        least = min(doubts, key=doubts.__getitem__) if doubts else None
        found.append(Ranked(each, least, None if least is None else known.get(least)))
    return sorted(found, key=lambda each: 2.0 if each.rank is None else each.rank)


def rank(own: float, among: Sequence[float]) -> float | None:
    """The share of the others that was less sure; of those as sure, half counts. None among too few.

    `among` has the answer's own confidence, too.
    """
    others = len(among) - 1
    if others < _FEWEST:
        return None
    less, equal = sum(each < own for each in among), sum(each == own for each in among) - 1
    return (less + equal / 2) / others


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
