"""May a candidate be assigned? Decided without labels, from masks and statistics alone.

    verdict = judge(ROUTING, ObservedRouting(candidate, parent, replicas, ..., consensus(space, images)))

What a candidate is decides on its gate. A dose that the service itself computed in closed form from the scans
is bounded, and has `BY_SHIFT`: a veto. What was learned, or named by a person, has to show more: `ROUTING`.

The gate cannot know that a candidate is better. It rejects what worse candidates look like: masks unlike the
parent's, masks that change with the seed, masks that no anatomy has, and images unlike those of training. And
it requires a sign of the opposite: masks nearer than the parent's to what all models of the federation say.
Entropy is no check: adaptation minimises it, and collapsed masks have the lowest.
"""

from __future__ import annotations

from personalization.gate.check import Check, CheckResult, GateVerdict, judge, limits
from personalization.gate.consensus import consensus
from personalization.gate.lens import (
    BY_LENS,
    BY_LENS_WITHOUT_MASKS,
    SHOWS,
    ObservedClassesThroughLens,
    ObservedLens,
    ObservedScans,
    ThroughLens,
)
from personalization.gate.parent import Targets
from personalization.gate.routing import ROUTING, ObservedRouting
from personalization.gate.shift import (
    BY_SHIFT,
    BY_SHIFT_WITHOUT_MASKS,
    ObservedClasses,
    ObservedDose,
    Shifted,
)
from personalization.gate.statistics import shift_of_statistics, statistics_distance

__all__ = [
    "BY_LENS",
    "BY_LENS_WITHOUT_MASKS",
    "BY_SHIFT",
    "BY_SHIFT_WITHOUT_MASKS",
    "ROUTING",
    "SHOWS",
    "Check",
    "CheckResult",
    "GateVerdict",
    "ObservedClasses",
    "ObservedClassesThroughLens",
    "ObservedDose",
    "ObservedLens",
    "ObservedRouting",
    "ObservedScans",
    "Shifted",
    "Targets",
    "ThroughLens",
    "consensus",
    "judge",
    "limits",
    "shift_of_statistics",
    "statistics_distance",
]
