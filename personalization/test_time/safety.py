"""Detect without labels that an adaptation has gone wrong.

A loss that rewards certainty has a trivial minimum: one class everywhere, with certainty. So each epoch's
masks are compared with those of step 0, an average of models that were trained on this target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SafetyLimits:
    """Limits of an epoch's distance from step 0. Set by reasoning, not by labels.

    agreement   0.5: Dice with step 0's masks, all images as one, mean over classes. Below it more of the mask
                is replaced than kept, which is no refinement of what the federation learned.
    collapse    1/3 and
    explosion   3: of a class's size at step 0. A mask a third or three times as large has an agreement of 0.5
                at the very most (2 * 1/3 / (1 + 1/3)), so these add little but the name of what happened;
                and the background, which agreement leaves out, may collapse too.
    smallest    0.0001 of all pixels (15 of 384x384): a class smaller than that is specks, and their ratios
                mean nothing. It may vanish.
    room        0.02 of all pixels: to which any class may grow, however small it was.
    divergence  2: the loss is being minimised. Twice that of step 0 is no descent any more, but the rate.
    slack       0.01 of the largest value the loss can take: a loss that is nearly nothing may double.
    """

    agreement: float = 0.5
    collapse: float = 1 / 3
    explosion: float = 3.0
    smallest: float = 1e-4
    room: float = 0.02
    divergence: float = 2.0
    slack: float = 0.01


@dataclass(frozen=True)
class MaskStats:
    """Statistics of the masks of one state of the network on all images, compared with step 0's.

    `loss` is the unsupervised loss, `ceiling` about the most it can be; `sizes` the share of all pixels each
    class takes, background first; `agreement` the Dice with step 0's masks.
    """

    loss: float
    ceiling: float
    sizes: tuple[float, ...]
    agreement: float

    @property
    def foreground(self) -> float:
        """Share of all pixels that are any class but background."""
        return 1 - self.sizes[0]


class MaskOverlap:
    """Counts of two class maps, batch by batch: sizes and agreement without keeping the masks."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._counts = torch.zeros(classes, classes, dtype=torch.int64)  # [before, now]

    def add(self, now: Tensor, before: Tensor) -> None:
        """Class indices of equal shape."""
        pairs = before.flatten().long().cpu() * self.classes + now.flatten().to("cpu", torch.uint8).long()
        self._counts += torch.bincount(pairs, minlength=self.classes**2).view(self.classes, -1)

    def sizes(self) -> tuple[float, ...]:
        """Share of all pixels that are each class 0..K-1 now."""
        return tuple((self._counts.sum(0).double() / self._counts.sum()).tolist())

    def agreement(self, smallest: float = SafetyLimits.smallest) -> float:
        """Mean over classes 1..K-1 of their Dice, all images as one; 1 where there is nothing to compare.

        A class that is smaller than `smallest` in both is left out.
        """
        now, before = self._counts.sum(0).double(), self._counts.sum(1).double()
        present = torch.maximum(now, before) >= smallest * self._counts.sum()
        present[0] = False
        dice = 2 * self._counts.diagonal() / (now + before).clamp(min=1)
        return float(dice[present].mean()) if bool(present.any()) else 1.0


def unsafe_reason(now: MaskStats, start: MaskStats, limits: SafetyLimits) -> str | None:
    """Return why `now` is not safe compared with step 0 (`start`); None if it is safe."""
    if not math.isfinite(now.loss):
        return "the loss is not a finite number; lower the learning rates"
    most = max(limits.divergence * start.loss, start.loss + limits.slack * start.ceiling)
    if now.loss > most:
        return (
            f"the loss diverged: {now.loss:.4g}, at step 0 it was {start.loss:.4g} "
            f"(at most {most:.4g}); lower the learning rates"
        )
    for index, (size, before) in enumerate(zip(now.sizes, start.sizes, strict=True)):
        name = _name(index, len(now.sizes))
        found = f"{size:.3%} of the pixels, at step 0 it was {before:.3%}"
        if before >= limits.smallest and size < limits.collapse * before:
            return f"{name} collapsed: {found} (at least {limits.collapse * before:.3%})"
        if index and size > (largest := max(limits.explosion * before, limits.room)):
            return f"{name} exploded: {found} (at most {largest:.3%})"
    if now.agreement < limits.agreement:
        return (
            f"the masks no longer agree with those of step 0: Dice {now.agreement:.2f}, "
            f"expected at least {limits.agreement:.2f}"
        )
    return None


def _name(index: int, classes: int) -> str:
    if index == 0:
        return "the background"
    return "the foreground" if classes == 2 else f"class {index}"
