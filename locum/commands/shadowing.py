"""A version that answers unseen beside the one that serves: begin it, end it, and see how both compare."""

from __future__ import annotations

import json
from collections.abc import Sequence

from locum.answers import Shadow
from locum.client import Client
from locum.commands.deciding import actor_of
from locum.commands.terminal import Terminal, aligned

_console = Terminal(highlight=False, soft_wrap=True, markup=False)


def show(hospital: str, model: str, as_json: bool) -> None:
    """Print the newest shadows. Raises LocumError."""
    with Client() as client:
        found = client.shadows(hospital, model)
    if as_json:
        # ASCII alone: no name moves the cursor.
        _console.out(json.dumps([each.raw for each in found], indent=2), highlight=False)
        return
    if not found:
        _console.print(f"no version answered scans of {hospital} unseen beside {model}")
    _print(found)


def begin(
    hospital: str,
    model: str,
    version: str,
    every: int,
    corrections: int | None,
    gain: float,
    reason: str,
    actor: str | None,
) -> None:
    """Begin a shadow. Raises LocumError."""
    name, _, number = version.rpartition("@")
    given: int | str = int(number) if name in ("", model) and number.isdigit() else version
    rule = None if corrections is None else {"corrections": corrections, "gain": gain}
    with Client() as client:
        actor = actor_of(client, actor)
        made = client.begin_shadow(hospital, model, given, reason, every=every, rule=rule, actor=actor)
    _console.print(f"{made.artefact} answers one scan in {made.every} of {hospital}, unseen")


def end(hospital: str, model: str, reason: str, actor: str | None) -> None:
    """End the shadow. Raises LocumError."""
    with Client() as client:
        _print([client.end_shadow(hospital, model, reason, actor=actor_of(client, actor))])


def _print(shadows: Sequence[Shadow]) -> None:
    for each in shadows:
        until = "now" if each.ended is None else f"{each.ended:%Y-%m-%d} ({each.ended_by})"
        _console.print(
            f"{each.artefact}: {each.answers} scans, one in {each.every}, {each.began:%Y-%m-%d} to {until}"
        )
        header = ("label", "agreement", "bias mL", "confidence", "its confidence", "Dice", "its Dice")
        rows = [
            (
                name,
                _number(label.agreement, 3),
                _number(label.bias_ml, 1),
                _number(label.served_confidence, 3),
                _number(label.shadow_confidence, 3),
                _number(label.served_dice, 3),
                _number(label.shadow_dice, 3),
            )
            for name, label in each.labels.items()
        ]
        for line in aligned([header, *rows]) if rows else ():
            _console.print(f"  {line}")
        if each.gain is not None:
            least = "" if each.at_least is None else f", at least {100 * each.at_least:+.1f}"
            gained = f"{100 * each.gain:+.1f} points of Dice{least}"
            _console.print(f"  on {each.corrected} corrected answers: {gained}")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
