"""Evidence held against the thresholds: a verdict, check by check, in words for a person."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from personalization.gate.evidence import Evidence
from personalization.gate.thresholds import THRESHOLDS, Thresholds

Bound = Literal["at least", "above", "at most"]


@dataclass(frozen=True)
class Check:
    """One question: `value` must be at least, above, or at most (`bound`), `limit`.

    A value of None was not measured, and does not count against the candidate. What is no number fails; JSON
    has None for it too, with `passed` False.
    """

    name: str
    value: float | None
    limit: float
    passed: bool
    meaning: str
    bound: Bound


@dataclass(frozen=True)
class GateVerdict:
    """Whether the candidate may be assigned: it must pass every check."""

    passed: bool
    checks: tuple[Check, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON has it: {"passed": ..., "checks": [{"name", "value", "limit", "bound", ...}]}."""
        return {"passed": self.passed, "checks": [asdict(check) for check in self.checks]}


_MEANINGS: dict[str, tuple[Bound, str]] = {
    "agreement": (
        "at least",
        "Dice with the parent's masks, mean over the scans in which either finds anything",
    ),
    "stability": (
        "at least",
        "Dice with the masks of the same adaptation from another seed, or from half of the scans; the lowest",
    ),
    "consensus_gain": (
        "above",
        "how much more than the parent's the masks agree with those of the federation's models together: "
        "the lower bound (95 %) over scans, with training's statistics or these scans', the lower",
    ),
    "size_factor": ("at most", "by how much the class that changed most grew or shrank over all scans"),
    "emptied": (
        "at most",
        "share of the scans in which the parent finds something and the candidate nothing",
    ),
    "giant": ("at most", "share of the scans with a mask far beyond the parent's largest"),
    "fragments": ("at most", "pieces per mask, plus one, over those of the parent, plus one"),
    "source_warnings": ("at most", "share of the scans that do not look like those of training"),
    "statistics_distance": (
        "at most",
        "how far the layers' statistics on these scans are from training's (0 equal, 1 nothing in common)",
    ),
}


_HOLDS: Mapping[Bound, Callable[[float, float], bool]] = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
}


def judge(evidence: Evidence, thresholds: Thresholds = THRESHOLDS) -> GateVerdict:
    """Hold the evidence against the thresholds."""
    return held_against(vars(evidence), vars(thresholds), _MEANINGS)


def held_against(
    values: Mapping[str, float | None],
    limits: Mapping[str, float],
    meanings: Mapping[str, tuple[Bound, str]],
) -> GateVerdict:
    """A check for each of `meanings`. What is no number passes none; None was not measured, and passes."""
    checks = []
    for name, (bound, meaning) in meanings.items():
        value, limit = values[name], limits[name]
        passed = value is None or _HOLDS[bound](value, limit)
        checks.append(Check(name, value, limit, passed, meaning, bound))
    return GateVerdict(all(check.passed for check in checks), tuple(checks))
