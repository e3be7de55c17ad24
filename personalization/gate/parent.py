"""A candidate's masks beside those of the version that it started from, and the checks that need no more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from personalization.gate.check import check
from personalization.gate.masks import (
    MIN_COMPONENT,
    Comparison,
    Maps,
    checked_index,
    checked_maps,
    largest_plausible_share,
    mean_fragments,
)

# Share of all pixels, added to sizes before they are divided, so that 0 / 0 counts as no change.
EPS = 1e-4


@dataclass(frozen=True)
class Targets:
    """What the targets of the federation's members look like, at the network's resolution; 0 is unknown.

    Attributes:
        share: of all pixels that are a target.
        largest: share of a patient's pixels that are a target, where it is large.
        pieces: connected pieces per slice and foreground class, over those that are there.
    """

    share: float = 0.0
    largest: float = 0.0
    pieces: float = 0.0


UNKNOWN_TARGETS = Targets()


class BesideParent:
    """A candidate's masks on the hospital's scans, beside its parent's.

    Legend: N slices, H rows, W columns, S scans.
    """

    def __init__(
        self,
        candidate: ArrayLike,
        parent: ArrayLike,
        scan_index: ArrayLike,
        classes: int,
        targets: Targets = UNKNOWN_TARGETS,
    ) -> None:
        """Check the class maps [N, H, W], and compare the candidate's with the parent's.

        Args:
            candidate: its masks.
            parent: the global model's masks of the same slices, whatever serves the hospital now.
            scan_index: which slices [N] belong to one scan; a patient's scans count as one where the
                patient is known.
            classes: how many there are, background included.
            targets: of the federation's members. A parent that finds next to nothing is no measure of size.

        Raises:
            LabelError: the maps differ in shape or hold values that are no classes.
        """
        self.candidate: Maps = checked_maps(candidate, "candidate", classes)
        self.parent: Maps = checked_maps(parent, "parent", classes, self.candidate)
        self.scan_index = checked_index(scan_index, len(self.candidate))
        self.classes = classes
        self.targets = targets
        self.comparison = Comparison.of(self.candidate, self.parent, self.scan_index, classes)

    @property
    def sizes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Foreground of each scan [S] in slices' worth: the candidate's and the parent's."""
        return self.comparison.first[:, 1:].sum(axis=1), self.comparison.second[:, 1:].sum(axis=1)

    @property
    def slices(self) -> NDArray[np.float64]:
        """How many slices each scan has [S]."""
        counts: NDArray[np.float64] = self.comparison.first.sum(axis=1)
        return counts


@check(
    "size_factor",
    "at most",
    2.0,
    "by how much the class that changed most grew or shrank over all scans",
    "A structure became far larger or smaller over all scans.",
)
def size_factor(observed: BesideParent) -> float:
    """A mask half or twice as large has a Dice of at most 0.67, so agreement would reject it too. This check
    names the cause, for each class over all scans together.

    Where the parent fails, what finds the target again is many times larger. So where the members' size is
    known, all classes together may have any size between the parent's and the members', and beyond these the
    nearer counts; a single class may then grow. `size_gain` refuses a target that moves away from the
    members'.
    """
    counts = observed.comparison.counts.sum(axis=0)
    now = counts.sum(axis=1)[1:] / counts.sum() + EPS
    before = counts.sum(axis=0)[1:] / counts.sum() + EPS
    if not observed.targets.share:
        return float(np.maximum(now / before, before / now).max())
    low, high = sorted((float(before.sum()), observed.targets.share + EPS))
    whole = max(low / float(now.sum()), float(now.sum()) / high, 1.0)
    return whole if len(now) == 1 else max(whole, float((before / now).max()))


@check(
    "emptied",
    "at most",
    0.2,
    "share of the scans in which the parent finds something and the candidate nothing",
    "It finds nothing in scans in which the version before found something.",
)
def lost_target_rate(observed: BesideParent) -> float:
    """The parent's false alarms may disappear; a target that disappears in one scan of five is lost."""
    own, before = observed.sizes
    return float(np.mean((before >= MIN_COMPONENT) & (own < MIN_COMPONENT)))


@check(
    "giant",
    "at most",
    0.1,
    "share of the scans with a mask far beyond the largest of the parent and of the members' targets",
    "Some of its masks are far beyond the largest of before.",
)
def oversized_rate(observed: BesideParent) -> float:
    """One scan of ten may be unusual, but no anatomy doubles."""
    own, before = observed.sizes
    largest = max(float((before / observed.slices).max()), observed.targets.largest)
    return float(np.mean(own / observed.slices > largest_plausible_share(largest)))


@check(
    "fragments",
    "at most",
    2.0,
    "pieces per mask, plus one, over those of the parent or of the members' targets, plus one",
    "Its masks fall apart into more pieces.",
)
def fragments(observed: BesideParent) -> float:
    """Up to twice as many pieces, and one more; noise makes hundreds."""
    found, before = (mean_fragments(maps, observed.classes) for maps in (observed.candidate, observed.parent))
    return (found + 1) / (max(before, observed.targets.pieces) + 1)
