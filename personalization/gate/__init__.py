"""May a candidate be assigned? Answered without labels, from masks and statistics alone.

    verdict = judge(gather(candidate, parent, replicas, ..., references=consensus(space, images)))

It cannot know that a candidate is better. It knows what those that are worse look like: unlike the parent,
another one after another draw of the dice, with masks that no anatomy has, or made for other images. And it
asks for a sign of the opposite: masks nearer than the parent's to what all models of the federation say.
Entropy is not asked: adaptation minimises it, and the surest masks are the collapsed ones.
"""

from __future__ import annotations

from personalization.gate.consensus import consensus
from personalization.gate.evidence import Evidence, gather
from personalization.gate.statistics import shift_of_statistics, statistics_distance
from personalization.gate.thresholds import THRESHOLDS, Thresholds
from personalization.gate.verdict import Check, GateVerdict, judge

__all__ = [
    "THRESHOLDS",
    "Check",
    "Evidence",
    "GateVerdict",
    "Thresholds",
    "consensus",
    "gather",
    "judge",
    "shift_of_statistics",
    "statistics_distance",
]
