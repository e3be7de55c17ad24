"""The change plan of a hospital's model: write it, show it, end it."""

from __future__ import annotations

import json
from pathlib import Path

from locum.answers import ChangePlan
from locum.client import Client
from locum.commands.accepting import read_settings
from locum.commands.deciding import actor_of
from locum.commands.terminal import Terminal

_console = Terminal(highlight=False, soft_wrap=True, markup=False)


def show(hospital: str, model: str, as_json: bool) -> None:
    """Print the plan, and what waits for a second signature. Raises LocumError."""
    with Client() as client:
        _print(client.change_plan(hospital, model), as_json)


def write(hospital: str, model: str, file: Path | None, reason: str, actor: str | None) -> None:
    """Write the plan of a file, or end it without one. Raises LocumError."""
    plan = None if file is None else read_settings(file, "a plan, such as `recipes: [auto, masks]`")
    with Client() as client:
        made = client.set_change_plan(hospital, model, plan, reason, actor=actor_of(client, actor))
    _print(made, False)


def _print(found: ChangePlan, as_json: bool) -> None:
    if as_json:
        # ASCII alone: no name moves the cursor.
        _console.out(json.dumps(found.raw, indent=2), highlight=False)
        return
    if found.plan is None:
        _console.print(f"{found.model} at {found.hospital}: no change plan; an assignment needs one approver")
        return
    _console.print(
        f"{found.model} at {found.hospital}: by {found.actor}, {found.since:%Y-%m-%d}: {found.reason}"
    )
    for name, value in found.plan.items():
        if value not in (None, [], "", False, 0):
            _console.print(f"  {name}: {', '.join(value) if isinstance(value, list) else value}")
    for each in found.waiting:
        _console.print(f"  waits for a second signature: {each.version}, by {each.actor}: {each.reason}")
