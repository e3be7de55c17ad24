"""May the picked cluster's model be assigned? Answered without labels.

It cannot know that the model is right. It knows what picks look like that are not to be trusted: another pick
from other scans of the hospital, a model that says the same whatever it sees, or one that meets images unlike
any it was made for.
"""

from __future__ import annotations

from dataclasses import dataclass

from personalization.gate.verdict import Bound, GateVerdict, held_against


@dataclass(frozen=True)
class PickEvidence:
    """The numbers that are judged; their meaning is below. None: not measured."""

    stability: float | None
    information: float
    statistics_distance: float
    source_warnings: float


@dataclass(frozen=True)
class PickThresholds:
    """Set by reasoning and on the phantom, never on the labels of real scans from outside.

    - stability 0.8: a pick that one draw of the scans in five overturns says as much about the scans that
      happened to be sent as about the hospital.
    - information 0.05: models that answer nearly always the same have less on the phantom, nearly all others
      more.
    - statistics_distance 0.06: beyond it, on the phantom, picks are wrong more often than right; right ones
      are there too (docs/results/picking.md).
    - source_warnings 0.5: where most scans do not look like training's, nothing else here is worth much.
    """

    stability: float = 0.8
    information: float = 0.05
    statistics_distance: float = 0.06
    source_warnings: float = 0.5


_MEANINGS: dict[str, tuple[Bound, str]] = {
    "stability": (
        "at least",
        "share of draws from the scans (bootstrap) that pick the same cluster",
    ),
    "information": (
        "at least",
        "how much the answers depend on the image: 0 always the same, 1 sure, and all classes in equal parts",
    ),
    "statistics_distance": (
        "at most",
        "how far what the layers see in these scans is from what they expect (0 equal, 1 nothing in common)",
    ),
    "source_warnings": ("at most", "share of the scans that do not look like those of training"),
}


def judge_pick(evidence: PickEvidence, thresholds: PickThresholds | None = None) -> GateVerdict:
    """Hold the evidence against the thresholds."""
    return held_against(vars(evidence), vars(thresholds or PickThresholds()), _MEANINGS)
