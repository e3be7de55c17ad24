"""Adapt a network to a hospital by the masks of a few of its scans (preset `masks`).

    fitted = fit(parent, examples, MasksConfig(), score)

`fitted.network` is never worse than the parent on the masks that were held out: the parent is an answer too.
"""

from personalization.masks.fine_tuning import (
    Fitted,
    FoldScores,
    MasksCheckpoint,
    MasksConfig,
    fit,
    patient_dice,
)
from personalization.masks.verdict import BY_MASKS, ObservedFit

__all__ = [
    "BY_MASKS",
    "Fitted",
    "FoldScores",
    "MasksCheckpoint",
    "MasksConfig",
    "ObservedFit",
    "fit",
    "patient_dice",
]
