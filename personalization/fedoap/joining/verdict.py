"""The gate of a joining: may the hospital's model be assigned?

Where the hospital has labels, they decide; masks without labels must be plausible. The validation patients
chose the epoch, so their Dice is optimistic. It is compared with the parent's on the same patients, and step
0 could have been chosen. Agreement with the parent, which the gate without labels requires, is no check here:
zero-shot is worth little.
"""

from __future__ import annotations

from collections.abc import Iterable

from numpy.typing import ArrayLike

from personalization.fedoap.joining.join import Joining
from personalization.gate.check import Check, check
from personalization.gate.drawn import BesideDrawn, fragments, lost_target_rate, oversized_rate

_CLASSES = 2


class ObservedJoining(BesideDrawn):
    """A joining, and the kept epoch's masks beside the hospital's own."""

    def __init__(self, joining: Joining, scans: Iterable[tuple[ArrayLike, ArrayLike | None]]) -> None:
        """Measure the masks as `BesideDrawn`, which raises LabelError.

        `joining` has the validation of step 0 and of the epoch that was kept, `scans` the kept epoch's maps.
        """
        super().__init__(scans, _CLASSES)
        self.joining = joining


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


JOINING: tuple[Check[ObservedJoining], ...] = (
    validation_dice,
    dice_gain,
    false_positives,
    oversized_rate,
    lost_target_rate,
    fragments,
)
