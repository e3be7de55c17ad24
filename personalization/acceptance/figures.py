"""The figures of one label over patients, each with its number of patients and its pessimistic bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from personalization.acceptance.bounds import FEWEST, lower_bound, share_bound
from personalization.acceptance.measures import Measure

# Standard deviations within which 95 % of normal differences are (Bland and Altman, Lancet 1986).
_LIMITS: Final = 1.96


@dataclass(frozen=True)
class Figures:
    """One label over the patients with a mask. Bounds are one-sided, 95 % sure, None below `FEWEST` patients.

    Attributes:
        n: patients in whom the label was drawn: Dice, surface Dice and `missed` are over them.
        dice, lower_bound: mean Dice, 0 where nothing of it was found.
        surface_dice, surface_dice_lower_bound: the same of normalised surface Dice.
        hd95, hd95_upper_bound, hd95_n: mean over patients with two surfaces, in `hd95_unit` of the report.
        missed, missed_upper_bound: share of patients in whom no voxel of the label was hit.
        found_elsewhere, without: patients in whom it was found of those in whom it was not drawn.
        bias_ml, limits, bias_n: mean of answer less mask over all patients, and the limits of agreement;
            None of images.
        bias_share: the difference of all voxels as a share of those drawn; None where none were.
    """

    n: int
    dice: float | None
    lower_bound: float | None
    surface_dice: float | None
    surface_dice_lower_bound: float | None
    hd95: float | None
    hd95_upper_bound: float | None
    hd95_n: int
    missed: float | None
    missed_upper_bound: float | None
    found_elsewhere: int
    without: int
    bias_ml: float | None
    limits: tuple[float, float] | None
    bias_n: int
    bias_share: float | None


def figures_of(patients: Sequence[Measure]) -> Figures:
    """Sum up one label over patients, in any order."""
    there = [each for each in patients if each.drawn]
    dice = [each.dice for each in there]
    # A label that is not found has no surface, and no part of it is right.
    surface = [0.0 if math.isnan(each.surface_dice) else each.surface_dice for each in there]
    distances = [each.hd95 for each in there if not math.isnan(each.hd95)]
    missed = sum(not each.both for each in there)
    bias, limits, count = _agreement(patients)
    drawn = sum(each.drawn for each in patients)
    return Figures(
        n=len(there),
        dice=_mean(dice),
        lower_bound=_below(dice),
        surface_dice=_mean(surface),
        surface_dice_lower_bound=_below(surface),
        hd95=_mean(distances),
        hd95_upper_bound=_above(distances),
        hd95_n=len(distances),
        missed=missed / len(there) if there else None,
        missed_upper_bound=share_bound(missed, len(there)) if len(there) >= FEWEST else None,
        found_elsewhere=sum(bool(each.found) for each in patients if not each.drawn),
        without=len(patients) - len(there),
        bias_ml=bias,
        limits=limits,
        bias_n=count,
        bias_share=sum(each.found - each.drawn for each in patients) / drawn if drawn else None,
    )


def _agreement(patients: Sequence[Measure]) -> tuple[float | None, tuple[float, float] | None, int]:
    differences = [
        each.found_ml - each.drawn_ml
        for each in patients
        if each.found_ml is not None and each.drawn_ml is not None
    ]
    if not differences:
        return None, None, 0
    bias = float(np.mean(differences))
    if len(differences) < 2:
        return bias, None, 1
    away = _LIMITS * float(np.std(differences, ddof=1))
    return bias, (bias - away, bias + away), len(differences)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _below(values: Sequence[float]) -> float | None:
    """A share's bound is one, too."""
    return max(lower_bound(values), 0.0) if len(values) >= FEWEST else None


def _above(values: Sequence[float]) -> float | None:
    return -lower_bound([-value for value in values]) if len(values) >= FEWEST else None
