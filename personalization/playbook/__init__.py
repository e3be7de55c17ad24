"""The playbook: what the federation learned about its recipes by practising on its own members.

Members take turns as the hospital from outside. Recipes adapt to their unlabelled scans, and their labels
score the change (`practise`). From the aggregates of all members the server fits which recipe to take and
when to leave the global model alone (`fit`). A service decides by it (`Playbook.decide`).
"""

from __future__ import annotations

from personalization.playbook.choose import Choice, Tried, choose, verdict_by_practice
from personalization.playbook.dose import ByShift, by_shift
from personalization.playbook.features import (
    FEATURES,
    Features,
    View,
    features_of,
    targets_of,
    typical_targets,
    view,
)
from personalization.playbook.fit import fit, fit_gate
from personalization.playbook.playbook import FILE, Decision, GateModel, Playbook, RecipeRecord, ShiftRecord
from personalization.playbook.practice import Episode, Practice, Trial, passes, practise

__all__ = [
    "FEATURES",
    "FILE",
    "ByShift",
    "Choice",
    "Decision",
    "Episode",
    "Features",
    "GateModel",
    "Playbook",
    "Practice",
    "RecipeRecord",
    "ShiftRecord",
    "Trial",
    "Tried",
    "View",
    "by_shift",
    "choose",
    "features_of",
    "fit",
    "fit_gate",
    "passes",
    "practise",
    "targets_of",
    "typical_targets",
    "verdict_by_practice",
    "view",
]
