"""How far the step of this process is, for a thread that tells a person while the step computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Headway:
    """Batches that were trained on, of those planned so far; both 0 where a step trains on none."""

    done: int = 0
    planned: int = 0


# A process runs one step at a time, and integers are read whole.
_here = Headway()


def begin() -> None:
    """Begin a step."""
    _here.done = _here.planned = 0


def plan(batches: int) -> None:
    """Count on further batches: a step may train several networks."""
    _here.planned += batches


def advance() -> None:
    """A batch is done."""
    _here.done += 1


def now() -> Headway:
    """How far it is."""
    return Headway(_here.done, _here.planned)
