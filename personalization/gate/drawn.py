"""Checks of masks beside some that the hospital drew: they must be plausible where none was drawn.

Legend: N slices, H rows, W columns, S scans.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from personalization.errors import LabelError
from personalization.gate.check import check
from personalization.gate.masks import (
    MIN_COMPONENT,
    Maps,
    checked_index,
    checked_maps,
    largest_plausible_share,
    mean_fragments,
)


class BesideDrawn:
    """A candidate's masks of a cohort beside the hospital's own of some scans."""

    def __init__(
        self,
        found_NHW: ArrayLike,
        drawn_NHW: ArrayLike,
        drawn_on_N: ArrayLike,
        scan_index_N: ArrayLike,
        classes: int,
    ) -> None:
        """Check the class maps and measure them.

        Args:
            found_NHW: the candidate's class maps of all slices of the cohort.
            drawn_NHW: the hospital's; those of slices without a mask are ignored.
            drawn_on_N: which slices belong to a scan with a mask.
            scan_index_N: which slices belong to one scan.
            classes: of the task, background included.

        Raises:
            LabelError: maps differ in shape or hold values that are no classes; no scan has a mask.
        """
        self.classes = classes
        self.found: Maps = checked_maps(found_NHW, "found", classes)
        drawn = checked_maps(drawn_NHW, "drawn", classes, self.found)
        scans, known = checked_index(scan_index_N, len(self.found)), np.asarray(drawn_on_N, dtype=bool)
        if known.shape != scans.shape or not known.any():
            raise LabelError("drawn_on: expected one truth value per slice, and at least one true")
        self.drawn: Maps = drawn[known]
        self.slices_S: NDArray[np.int64] = np.bincount(scans)
        self.labelled_S: NDArray[np.bool_] = np.bincount(scans, known) > 0
        # In slices' worth: a target counts the same in a thick stack of slices as in one slice.
        pixels = tuple(range(1, self.found.ndim))
        self.size_S = _sums(scans, (self.found > 0).mean(axis=pixels))
        self.drawn_size_S = _sums(scans, (drawn > 0).mean(axis=pixels) * known)


def _sums(scans_N: NDArray[np.int64], values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum over each scan's slices [S]."""
    return np.bincount(scans_N, values_N).astype(np.float64, copy=False)


@check(
    "giant",
    "at most",
    0.1,
    "share of the scans with a mask over twice the largest that was drawn",
    "Some of its masks are far larger than the largest that was drawn.",
)
def oversized_rate(observed: BesideDrawn) -> float:
    """One scan of ten may be unusual; more that are over twice the largest drawn mask are not plausible."""
    drawn_share = (observed.drawn_size_S / observed.slices_S)[observed.labelled_S]
    largest = largest_plausible_share(float(drawn_share.max()))
    return float(np.mean(observed.size_S / observed.slices_S > largest))


@check(
    "emptied",
    "at most",
    0.5,
    "share of the scans without a mask in which nothing is found, beyond that of empty ones among the others",
    "It finds nothing in too many of the scans without a mask.",
)
def lost_target_rate(observed: BesideDrawn) -> float | None:
    """Scans without a mask should be empty about as often as those with one. Which scans were drawn on may be
    no accident, so half of them may differ.
    """
    labelled = observed.labelled_S
    if labelled.all():
        return None
    found, drawn = observed.size_S[~labelled], observed.drawn_size_S[labelled]
    return float(np.mean(found < MIN_COMPONENT) - np.mean(drawn < MIN_COMPONENT))


@check(
    "fragments",
    "at most",
    2.0,
    "pieces per mask, plus one, over those of the drawn ones, plus one",
    "Its masks fall apart into more pieces than the drawn ones.",
)
def fragments(observed: BesideDrawn) -> float:
    """Up to twice as many pieces as were drawn, and one more."""
    found, drawn = (mean_fragments(maps, observed.classes) for maps in (observed.found, observed.drawn))
    return (found + 1) / (drawn + 1)
