"""The streams of one scanner's answers: what is watched, and what of it is stored between two looks."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.observation import Stored
from service.watch.scores import Reference
from service.watch.stream import REFERENCE, Alarm, Level, Share

CORRECTIONS = "agreement with corrections"
"""The stream of what persons left of answers; there once an answer was corrected or accepted."""
CONFIDENCE = "confidence of "
MOST_LABELS = 6
"""Labels of a task that are watched, its first: each of them has three streams of the one budget."""

# A sum that is so far on the way to its limit is worth a look.
_NEAR = 0.7
# Which half of the week a value is ranked in: other patients come at weekends.
_SATURDAY = 5
_WEEK, _WEEKEND = "week", "weekend"


@dataclass
class Series:
    """The streams of the answers since a series began; `strains` are their sums over their limits.

    `known` are scans of which it was known before that they are usual.
    """

    levels: dict[str, Level] = field(default_factory=dict)
    shares: dict[str, Share] = field(default_factory=dict)
    answers: int = 0
    strains: dict[str, float] = field(default_factory=dict)
    corrections: int = 0
    known: int = 0

    @classmethod
    def after(cls, usual: Sequence[Stored]) -> Series:
        """Begin a series after the answers to scans that are known to be usual."""
        numbers: dict[str, list[float]] = {}
        facts: dict[str, list[bool]] = {}
        for stored in usual:
            for name, value in numbers_of(stored).items():
                numbers.setdefault(name, []).append(value)
            for name, yes in facts_of(stored).items():
                facts.setdefault(name, []).append(yes)
        return cls(
            {name: Level({_WEEK: Reference(values)}) for name, values in numbers.items()},
            {name: Share.after(values) for name, values in facts.items()},
            known=len(usual),
        )

    def take(self, stored: Stored, spacing: float) -> dict[str, Alarm]:
        """Take an answer; return the alarms that it raises, by stream."""
        self.answers += 1
        weekend = stored.row["at"].weekday() >= _SATURDAY
        found: dict[str, Alarm] = {}
        for name, value in numbers_of(stored).items():
            level = self.levels.setdefault(name, Level())
            alarm = level.take([value], spacing, [_WEEKEND if weekend else _WEEK])
            self.strains[name] = level.strain(spacing)
            if alarm is not None:
                found[name] = alarm
        for name, yes in facts_of(stored).items():
            share = self.shares.setdefault(name, Share())
            alarm = share.take([yes], spacing)
            self.strains[name] = share.strain(spacing)
            if alarm is not None:
                found[name] = alarm
        return found

    def take_correction(self, agreement: float, spacing: float) -> Alarm | None:
        """Take how much of an answer a person left, 0 to 1; return the alarm that it raises."""
        self.corrections += 1
        level = self.levels.setdefault(CORRECTIONS, Level())
        alarm = level.take([agreement], spacing, [_WEEK])
        self.strains[CORRECTIONS] = level.strain(spacing)
        return alarm

    @property
    def is_learning(self) -> bool:
        """Whether there are too few answers to say what is usual."""
        return self.known + self.answers < REFERENCE

    @property
    def is_near(self) -> bool:
        """Whether a sum is near its limit."""
        return not self.is_learning and max(self.strains.values(), default=0.0) >= _NEAR

    @property
    def state(self) -> dict[str, Any]:
        """What changes with every answer, as JSON."""
        return {
            "answers": self.answers,
            "levels": {name: level.state for name, level in self.levels.items()},
            "shares": {name: share.state for name, share in self.shares.items()},
            "strains": self.strains,
            "corrections": self.corrections,
            "known": self.known,
        }

    @property
    def usual(self) -> bytes:
        """The values that others are ranked among."""
        arrays = {
            f"{name}/{stratum}": reference.values
            for name, level in self.levels.items()
            for stratum, reference in level.references.items()
        }
        content = io.BytesIO()
        np.savez(content, allow_pickle=False, **arrays)
        return content.getvalue()

    @classmethod
    def of(cls, state: Mapping[str, Any], usual: bytes) -> Series:
        """Go on from what was stored."""
        if not state:
            return cls()
        references: dict[str, dict[str, Reference]] = {}
        with np.load(io.BytesIO(usual), allow_pickle=False) as arrays:
            for key in arrays.files:
                name, _, stratum = key.rpartition("/")
                references.setdefault(name, {})[stratum] = Reference(arrays[key])
        return cls(
            {name: Level.of(each, references.get(name, {})) for name, each in state["levels"].items()},
            {name: Share.of(each) for name, each in state["shares"].items()},
            state["answers"],
            dict(state["strains"]),
            state.get("corrections", 0),
            state.get("known", 0),
        )


def numbers_of(stored: Stored) -> dict[str, float]:
    """The numbers of an answer that are watched, by stream; those that were not measured are left out.

    `shift` is log R. By label `volume`, in mL or voxels, where it is there, and `confidence`.
    """
    found = {}
    if stored.row["shift"] is not None and stored.row["shift"] > 0:
        found["shift"] = math.log(stored.row["shift"])
    for label, row in _watched(stored):
        found[f"{CONFIDENCE}{label}"] = row["confidence"]
        if row["voxels"]:
            size = row["voxels"] if row["volume_ml"] is None else row["volume_ml"]
            found[f"volume of {label}"] = size
    return found


def facts_of(stored: Stored) -> dict[str, bool]:
    """What is true or not of an answer, by stream: the guard warned; a label is not there."""
    return {"warned": stored.row["unlike"] > 0} | {
        f"no {label}": not row["voxels"] for label, row in _watched(stored)
    }


def streams_of(labels: int) -> int:
    """How many streams the answers of a task with so many labels have."""
    return 2 + 3 * min(labels, MOST_LABELS)


def _watched(stored: Stored) -> list[tuple[str, Mapping[str, Any]]]:
    return list(stored.labels.items())[:MOST_LABELS]
