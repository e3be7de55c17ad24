"""A hospital that took no part in training: its patients in halves, and how an answer changes its Dice.

Each half is the cohort of a job in turn, and the other half is scored, as a hospital would be served after
it. Labels are for reporting only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from benchmarks.harness.evaluation import Scans, mean_dice, predict
from benchmarks.harness.scores import pair
from training.data.cases import Case

# A hospital's patients who take part at most, evenly spaced by name.
MOST_PATIENTS = 200
# Slices of a cohort, about.
MOST_SLICES = 128
Dice: TypeAlias = dict[str, float]


def halves(patients: Sequence[str], seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Two disjoint halves of the patients, drawn from the seed; the first is the larger of an odd number."""
    order = torch.randperm(len(patients), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn = [sorted(patients)[i] for i in order]
    middle = (len(drawn) + 1) // 2
    return tuple(sorted(drawn[:middle])), tuple(sorted(drawn[middle:]))


@dataclass(frozen=True)
class Turn:
    """What is learned from, and what is reported."""

    learned: Scans
    reported: Scans


@dataclass(frozen=True)
class HeldOutHospital:
    """The site left out: all its scans, and the halves of its patients for the inductive comparison.

    At most about `most` slices are learned from at a time; all are reported.
    """

    scans: Scans
    halves: tuple[Scans, Scans]
    most: int

    @classmethod
    def of(cls, scans: Scans, seed: int, most: int) -> HeldOutHospital:
        """Halves drawn from the seed."""
        first, second = halves(scans.patients, seed)
        return cls(scans, (scans.of(first), scans.of(second)), most)

    def turns(self) -> tuple[Turn, Turn]:
        """Inductive: each half to learn from, with the other to report."""
        first, second = self.halves
        return Turn(first.thinned(self.most), second), Turn(second.thinned(self.most), first)


def some_of(cases: Sequence[Case]) -> list[Case]:
    """Cases of at most `MOST_PATIENTS` patients, evenly spaced by name."""
    patients = sorted({case.patient for case in cases})
    kept = set(patients[:: math.ceil(len(patients) / MOST_PATIENTS)])
    return [case for case in cases if case.patient in kept]


def dice_of(network: nn.Module, scans: Scans) -> Dice:
    """Foreground Dice of every patient."""
    return scans.dice(predict(network, scans.images))


def changes_of(before: Dice, after: Dice) -> list[float]:
    """The change of every patient in `after` with a defined Dice."""
    pairs = [pair(before[patient], after[patient]) for patient in after]
    return [second - first for first, second in pairs if math.isfinite(first)]


def change_of(before: Dice, after: Dice) -> float:
    """The mean change of the patients in `after`; 0 of none."""
    changes = changes_of(before, after)
    return math.fsum(changes) / len(changes) if changes else 0.0


def arms_of(before: Dice, arms: Mapping[str, Dice]) -> dict[str, Any]:
    """The global model's mean Dice; of each arm the mean change, its deviation over patients, and the share
    of them who lose more than a point."""
    found: dict[str, Any] = {"global": short(mean_dice(before)), "patients": len(before)}
    for name, after in arms.items():
        changes = np.array(changes_of(before, after))
        harmed = float(np.mean(changes < -0.01))
        found[name] = [short(float(changes.mean())), short(float(changes.std())), short(harmed)]
    return found


def short(value: float) -> float:
    """Rounded as rows have it."""
    return round(float(value), 5)
