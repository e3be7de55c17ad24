"""The gate of a picked cluster: may its model be assigned? No label is used.

The gate cannot know that the model is right. It rejects a pick that other scans of the hospital would not
make, a model that gives the same answer to every image, and images unlike any that the model was trained on.
Limits were set by reasoning and on the phantom, never on the labels of real scans from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from personalization.gate.check import Check, check
from personalization.options.picking import Criterion


@dataclass(frozen=True)
class Pick:
    """A pick as it was made.

    Attributes:
        cluster: name of the picked cluster.
        costs: by criterion, of every cluster's model (`personalization.fedbicross.picking.costs`).
        stability: share of draws from the scans that pick the same cluster; None: not measured.
        source_warnings: share of the scans that do not look like those of training.
    """

    cluster: str
    costs: Mapping[Criterion, Mapping[str, float]]
    stability: float | None
    source_warnings: float


@check(
    "stability",
    "at least",
    0.8,
    "share of draws from the scans (bootstrap) that pick the same cluster",
    "Other draws of the same scans pick another cluster.",
)
def stability(pick: Pick) -> float | None:
    """A pick that one draw of the scans in five overturns depends on which scans happened to be sent."""
    return pick.stability


@check(
    "information",
    "at least",
    0.05,
    "how much the answers depend on the image: 0 always the same, 1 sure, and all classes in equal parts",
    "Its answers hardly depend on the image.",
)
def information(pick: Pick) -> float:
    """On the phantom, models that nearly always give the same answer have less, nearly all others more."""
    return -pick.costs["information"][pick.cluster]


@check(
    "statistics_distance",
    "at most",
    0.06,
    "how far what the layers see in these scans is from what they expect (0 equal, 1 nothing in common)",
    "These scans are too far from those of training.",
)
def statistics_distance(pick: Pick) -> float:
    """Beyond it, on the phantom, picks are wrong more often than right; some right picks are beyond it too
    (docs/results/picking.md).
    """
    return pick.costs["statistics"][pick.cluster]


@check(
    "source_warnings",
    "at most",
    0.5,
    "share of the scans that do not look like those of training",
    "Too many scans do not look like those of training.",
)
def source_warnings(pick: Pick) -> float:
    """Where most scans do not look like training's, the other checks say little."""
    return pick.source_warnings


PICKING: tuple[Check[Pick], ...] = (stability, information, statistics_distance, source_warnings)
