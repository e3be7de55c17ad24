"""The gate of an adaptation by masks: may the hospital's model be assigned?

Held-out masks decide; masks of the other scans must be plausible. Agreement with the parent is no check:
where masks are needed, the parent is what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

from numpy.typing import ArrayLike

from personalization.gate.check import Check, check
from personalization.gate.drawn import BesideDrawn, fragments, lost_target_rate, oversized_rate
from personalization.masks.fine_tuning import Fitted


class ObservedFit(BesideDrawn):
    """A fit, and its network's masks beside the hospital's own."""

    def __init__(
        self, fitted: Fitted, scans: Iterable[tuple[ArrayLike, ArrayLike | None]], classes: int
    ) -> None:
        """Measure the masks as `BesideDrawn`, which raises LabelError."""
        super().__init__(scans, classes)
        self.gain = fitted.gain


@check(
    "held_out_gain",
    "at least",
    0.01,
    "change of Dice against the parent, mean over the patients, each held out of the fit that is scored",
    "It is not better than the global model on the patients that it did not learn from.",
)
def held_out_gain(observed: ObservedFit) -> float:
    """A model that is not better by a point of Dice needs no version of its own. The parent, where it was
    kept, fails here.
    """
    return observed.gain.mean


@check(
    "gain_bound",
    "at least",
    0.0,
    "what that change is at least, with 95 % certainty (Student's t over the patients)",
    "There are too few masks, or they differ too much, to exclude that it is worse than the global model.",
)
def gain_bound(observed: ObservedFit) -> float:
    """Below 0 a loss is not excluded. The folds share patients, so that the bound is somewhat too high; each
    network that is scored has learned from fewer masks than the candidate, which makes it too low.
    """
    return observed.gain.low


BY_MASKS: tuple[Check[ObservedFit], ...] = (
    held_out_gain,
    gain_bound,
    oversized_rate,
    lost_target_rate,
    fragments,
)
