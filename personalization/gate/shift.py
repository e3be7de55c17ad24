"""The gate of a dose by shift, which the service computed in closed form from the scans: a veto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from personalization.gate.check import Check, check
from personalization.gate.masks import checked_maps
from personalization.gate.parent import (
    BesideParent,
    Targets,
    fragments,
    lost_target_rate,
    oversized_rate,
    size_factor,
)

# By how much a target may be farther from the federation's size than the parent's: 5 %, as tanh(2 ln 1.05).
AWAY = 0.1
# Shift over the largest that was practised, and share of the practised episodes that may lose a point.
MOST_SHIFT = 2.0
MOST_LOST = 0.1
# Shift with the candidate's statistics over that with the parent's.
MOST_LEFT = 1.0
# How many times nearer scans may be in negative.
NEGATIVE = 2.0


@dataclass(frozen=True)
class Shifted:
    """What is known of the shift of the scans, and of a dose that it asks for.

    Attributes:
        beyond: the shift over the largest that the members, or else phantoms, practised.
        left: the shift under the candidate's statistics over that under the parent's.
        lost: share of the members' episodes in which that dose, served by this gate, lost more than a point;
            None: they did not practise it, or the dose is 0 here.
        negative: how many times farther the scans are than in negative; None: not measured.
        mistaken: share of the scans that no training scan resembles in kind (the guard's gross warnings).
    """

    beyond: float
    left: float
    lost: float | None = None
    negative: float | None = None
    mistaken: float = 0.0


class OfShift(Protocol):
    """What all gates of a dose have."""

    @property
    def shifted(self) -> Shifted:
        """The shift of the scans."""


class ObservedDose(BesideParent):
    """A dose of a segmentation."""

    def __init__(
        self,
        candidate: ArrayLike,
        parent: ArrayLike,
        scan_index: ArrayLike,
        classes: int,
        targets: Targets,
        shifted: Shifted,
        size_gain: float | None,
    ) -> None:
        """Compare the masks as `BesideParent`, which raises LabelError.

        `size_gain` is how much nearer than the parent's the target is to the sizes that members have, give or
        take one standard deviation over them; None: those are unknown.
        """
        super().__init__(candidate, parent, scan_index, classes, targets)
        self.shifted, self.size_gain = shifted, size_gain


class ObservedClasses:
    """A dose of a classification.

    Attributes:
        now, before: how many scans the candidate and the parent give each class [K].
        licensed: whether members practised the dose, or it changes nothing.
    """

    def __init__(
        self, candidate: ArrayLike, parent: ArrayLike, classes: int, shifted: Shifted, *, licensed: bool
    ) -> None:
        """Count the classes that the candidate and the parent give [N]. Raises LabelError for others."""
        self.now, self.before = (
            _counts(found, name, classes) for found, name in ((candidate, "candidate"), (parent, "parent"))
        )
        self.shifted, self.licensed = shifted, licensed


def _counts(classes_N: ArrayLike, what: str, classes: int) -> NDArray[np.int64]:
    found = checked_maps(np.asarray(classes_N)[:, None], what, classes)
    return np.bincount(found[:, 0], minlength=classes)


@check(
    "size_gain",
    "at least",
    -AWAY,
    "how much nearer the target is than the parent's to the size that the federation's members know",
    "What it finds moved away from the size that the member hospitals know.",
)
def size_gain(observed: ObservedDose) -> float | None:
    """In practice on phantoms most candidates that lost moved the target away from the members' size. It also
    refuses a hospital with other targets than the members', which is safe. The size of a shift does not tell
    its sign, so that a dose by shift has this veto too. Where the members' own targets differ in size, what
    differs no more is no sign: vessels of three cameras vary by a third, and a twentieth more of them is no
    harm.
    """
    return observed.size_gain


@check(
    "shift_beyond_practice",
    "at most",
    MOST_SHIFT,
    "the shift of these scans over the largest that the federation's members practised",
    "These scans are farther from the members' than all that they practised on.",
)
def shift_beyond_practice(observed: OfShift) -> float:
    """Cohorts of noise have ten times the shift of real ones. It is no guard of the modality: inverted scans
    have less shift than scans behind the strongest scanner.
    """
    return observed.shifted.beyond


@check(
    "shift_left",
    "at most",
    MOST_LEFT,
    "the shift that is left of these scans with the candidate's statistics, over that with the parent's",
    "With its statistics the scans are not nearer to what the network expects.",
)
def shift_left(observed: OfShift) -> float:
    """A dose of the scans' own statistics moves the network towards them, so less shift is left. Statistics
    of anything else move it away.
    """
    return observed.shifted.left


@check(
    "negative",
    "at most",
    NEGATIVE,
    "how many times farther these scans are from the members' than they are in negative",
    "These scans look inverted: bright where the members' are dark.",
)
def negative(observed: OfShift) -> float | None:
    """At most 1.8 of 160 cohorts of phantoms, as they are and behind drawn scanners. Inverted, 132 of them
    are above the limit, 12 are too near to be looked at, and 16 pass, most behind a scanner of severity 3.
    """
    return observed.shifted.negative


@check(
    "mistaken",
    "at most",
    0.5,
    "share of the scans that no training scan resembles in kind",
    "Most of these scans are of another kind than those of training.",
)
def mistaken(observed: OfShift) -> float:
    """Another modality can be nearer to the members than a strong scanner. That many scans only look unlike
    says little: behind a scanner of severity 3 nearly all do.
    """
    return observed.shifted.mistaken


@check(
    "practice_lost",
    "at most",
    MOST_LOST,
    "share of the members' episodes in which this recipe, as it is served, lost more than a point",
    "At the member hospitals this recipe lost too often.",
)
def practice_lost(observed: OfShift) -> float | None:
    """The members' licence: one scanner in ten may be one that no statistics cure."""
    return observed.shifted.lost


@check(
    "practised",
    "at least",
    1.0,
    "whether the members practised this recipe, or it changes nothing (1), or not (0)",
    "No member hospital practised this, which harms classifiers more often than it helps.",
)
def practised(observed: ObservedClasses) -> float:
    """At three centres of colonoscopy the dose lost 5.6 points of balanced accuracy, and 19 at one of them
    with every other check passed: statistics of images tell classes apart as well as scanners.
    """
    return float(observed.licensed)


@check(
    "class_lost",
    "at most",
    3.0,
    "by how much the class shrank that lost most of the scans that the version before gave it",
    "It hardly gives a class any more that the version before gave.",
)
def class_lost(observed: ObservedClasses) -> float:
    """Statistics of scans of mostly one class pull all answers to one class. One scan more on both sides, so
    that a class of a few scans is no measure.

    The limit is the collapse of a mask (`SafetyLimits`). A class may grow: a parent that fails gives one
    class alone.
    """
    return float(((observed.before + 1) / (observed.now + 1)).max())


# A dose that the service computed in closed form: veto, cap and licence, and what detects a collapse.
BY_SHIFT: tuple[Check[ObservedDose], ...] = (
    size_gain,
    shift_left,
    shift_beyond_practice,
    negative,
    mistaken,
    practice_lost,
    size_factor,
    lost_target_rate,
    oversized_rate,
    fragments,
)

# For a classification: what needs no masks, a licence, and classes that are lost.
BY_SHIFT_WITHOUT_MASKS: tuple[Check[ObservedClasses], ...] = (
    shift_left,
    shift_beyond_practice,
    negative,
    mistaken,
    practised,
    practice_lost,
    class_lost,
)
