"""May what joined be assigned? Labels answer what they can; masks without labels must be plausible.

The validation patients chose the epoch, so their Dice flatters; it is held against the parent's on the same
patients, and step 0 could have been chosen. Agreement with the parent, which the gate without labels asks
for, is not asked: zero-shot is worth little.

Legend: N slices, H rows, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from personalization.errors import LabelError
from personalization.fedoap.joining.join import Joining
from personalization.gate import GateVerdict
from personalization.gate.evidence import SPECK, largest_sound
from personalization.gate.masks import checked_index, checked_maps, mean_fragments
from personalization.gate.verdict import Bound, held_against

_CLASSES = 2


@dataclass(frozen=True)
class JoiningThresholds:
    """All of them, each with its reason.

    - validation_dice 0.5: below it two pixels are wrong for each that is found.
    - dice_gain 0.01: what is not better than zero-shot by a point of Dice on the hospital's patients needs no
      version of its own; step 0, where it was kept, fails here.
    - false_positives 0.5: whoever looks at slices without a tumour must not find one in most of them.
    - giant 0.1: one scan of ten may be odd; more that are over twice the largest that was drawn are not.
    - emptied 0.5: scans without a mask should be empty about as often as those with one; which of them were
      drawn on may be no accident, so half of them may differ.
    - fragments 2: up to twice as many pieces as were drawn, and one more.
    """

    validation_dice: float = 0.5
    dice_gain: float = 0.01
    false_positives: float = 0.5
    giant: float = 0.1
    emptied: float = 0.5
    fragments: float = 2.0


_MEANINGS: dict[str, tuple[Bound, str]] = {
    "validation_dice": (
        "at least",
        "Dice with the hospital's masks, mean over the validation patients with a tumour, who chose the "
        "epoch too",
    ),
    "dice_gain": ("at least", "how much higher that is than the parent's, which is zero-shot"),
    "false_positives": (
        "at most",
        "share of the validation slices without a tumour in which one is found, specks left out",
    ),
    "giant": ("at most", "share of the scans with a mask over twice the largest that was drawn"),
    "emptied": (
        "at most",
        "share of the scans nobody drew on in which nothing is found, beyond that of empty ones among the "
        "others",
    ),
    "fragments": ("at most", "pieces per mask, plus one, over those of the drawn ones, plus one"),
}


def judge_joining(
    joining: Joining,
    found_NHW: ArrayLike,
    drawn_NHW: ArrayLike,
    drawn_on_N: ArrayLike,
    scan_index_N: ArrayLike,
    thresholds: JoiningThresholds = JoiningThresholds(),
) -> GateVerdict:
    """Hold what joined against the thresholds; what cannot be measured does not count.

    Args:
        joining: with the validation of step 0 and of the epoch that was kept.
        found_NHW: the kept epoch's class maps of all slices of the cohort.
        drawn_NHW: the hospital's; those of slices without a mask are not looked at.
        drawn_on_N: which slices belong to a scan with a mask.
        scan_index_N: which slices are of one scan.
        thresholds: see there.

    Raises LabelError for maps of unlike shapes, or with values that are no classes.
    """
    found = checked_maps(found_NHW, "found", _CLASSES)
    drawn = checked_maps(drawn_NHW, "drawn", _CLASSES, found)
    scans, known = checked_index(scan_index_N, len(found)), np.asarray(drawn_on_N, dtype=bool)
    if known.shape != scans.shape or not known.any():
        raise LabelError("drawn_on: expected one truth value per slice, and at least one true")
    # In slices' worth, as a target counts the same in a thick stack of slices as in one of them; a giant is
    # told by the share of its scan.
    slices = np.bincount(scans)
    size = np.bincount(scans, found.mean(axis=(1, 2)))
    labelled = np.bincount(scans, known) > 0
    target = np.bincount(scans, drawn.mean(axis=(1, 2)) * known)
    largest = float((target / slices)[labelled].max())
    values = {
        "validation_dice": joining.best.dice,
        "dice_gain": joining.best.dice - joining.start.dice,
        "false_positives": joining.best.false_positives,
        "giant": float(np.mean(size / slices > largest_sound(largest))),
        "emptied": _emptied(size, target, labelled),
        "fragments": (mean_fragments(found, _CLASSES) + 1) / (mean_fragments(drawn[known], _CLASSES) + 1),
    }
    return held_against(values, vars(thresholds), _MEANINGS)


def _emptied(found_S: ArrayLike, drawn_S: ArrayLike, labelled_S: NDArray[np.bool_]) -> float | None:
    if labelled_S.all():
        return None
    return float(
        np.mean(np.asarray(found_S)[~labelled_S] < SPECK) - np.mean(np.asarray(drawn_S)[labelled_S] < SPECK)
    )
