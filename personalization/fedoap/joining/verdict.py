"""The gate of a joining: may the hospital's model be assigned?

Where the hospital has labels, they decide; masks without labels must be plausible. The validation patients
chose the epoch, so their Dice is optimistic. It is compared with the parent's on the same patients, and step
0 could have been chosen. Agreement with the parent, which the gate without labels requires, is no check here:
zero-shot is worth little.

Legend: N slices, H rows, W columns, S scans.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from personalization.errors import LabelError
from personalization.fedoap.joining.join import Joining
from personalization.gate.check import Check, check
from personalization.gate.masks import (
    MIN_COMPONENT,
    Maps,
    checked_index,
    checked_maps,
    largest_plausible_share,
    mean_fragments,
)

_CLASSES = 2


class ObservedJoining:
    """A joining, and the kept epoch's masks beside the hospital's own."""

    def __init__(
        self,
        joining: Joining,
        found_NHW: ArrayLike,
        drawn_NHW: ArrayLike,
        drawn_on_N: ArrayLike,
        scan_index_N: ArrayLike,
    ) -> None:
        """Check the class maps and measure them.

        Args:
            joining: with the validation of step 0 and of the epoch that was kept.
            found_NHW: the kept epoch's class maps of all slices of the cohort.
            drawn_NHW: the hospital's; those of slices without a mask are ignored.
            drawn_on_N: which slices belong to a scan with a mask.
            scan_index_N: which slices belong to one scan.

        Raises:
            LabelError: maps differ in shape or hold values that are no classes; no scan has a mask.
        """
        self.joining = joining
        self.found: Maps = checked_maps(found_NHW, "found", _CLASSES)
        drawn = checked_maps(drawn_NHW, "drawn", _CLASSES, self.found)
        scans, known = checked_index(scan_index_N, len(self.found)), np.asarray(drawn_on_N, dtype=bool)
        if known.shape != scans.shape or not known.any():
            raise LabelError("drawn_on: expected one truth value per slice, and at least one true")
        self.drawn: Maps = drawn[known]
        self.slices_S: NDArray[np.int64] = np.bincount(scans)
        self.labelled_S: NDArray[np.bool_] = np.bincount(scans, known) > 0
        # In slices' worth: a target counts the same in a thick stack of slices as in one slice.
        self.size_S = _sums(scans, self.found.mean(axis=(1, 2)))
        self.drawn_size_S = _sums(scans, drawn.mean(axis=(1, 2)) * known)


def _sums(scans_N: NDArray[np.int64], values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum over each scan's slices [S]."""
    return np.bincount(scans_N, values_N).astype(np.float64, copy=False)


@check(
    "validation_dice",
    "at least",
    0.5,
    "Dice with the hospital's masks, mean over the validation patients with a tumour, who chose the "
    "epoch too",
    "Its masks are too far from those that were drawn.",
)
def validation_dice(observed: ObservedJoining) -> float:
    """Below it two pixels are wrong for each that is found."""
    return observed.joining.best.dice


@check(
    "dice_gain",
    "at least",
    0.01,
    "how much higher that is than the parent's, which is zero-shot",
    "It is not better than the shared model on the patients that it did not learn from.",
)
def dice_gain(observed: ObservedJoining) -> float:
    """A model that is not better than zero-shot by a point of Dice on the hospital's patients needs no
    version of its own. Step 0, where it was kept, fails here.
    """
    return observed.joining.best.dice - observed.joining.start.dice


@check(
    "false_positives",
    "at most",
    0.5,
    "share of the validation slices without a tumour in which one is found, specks left out",
    "It finds a target in too many slices that were drawn without one.",
)
def false_positives(observed: ObservedJoining) -> float | None:
    """A reader of slices without a tumour must not find one in most of them."""
    return observed.joining.best.false_positives


@check(
    "giant",
    "at most",
    0.1,
    "share of the scans with a mask over twice the largest that was drawn",
    "Some of its masks are far larger than the largest that was drawn.",
)
def oversized_rate(observed: ObservedJoining) -> float:
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
def lost_target_rate(observed: ObservedJoining) -> float | None:
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
def fragments(observed: ObservedJoining) -> float:
    """Up to twice as many pieces as were drawn, and one more."""
    found, drawn = (mean_fragments(maps, _CLASSES) for maps in (observed.found, observed.drawn))
    return (found + 1) / (drawn + 1)


JOINING: tuple[Check[ObservedJoining], ...] = (
    validation_dice,
    dice_gain,
    false_positives,
    oversized_rate,
    lost_target_rate,
    fragments,
)
