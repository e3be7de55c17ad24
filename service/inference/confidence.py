"""How sure a segmentation is of each label, by its own probabilities, and how far two answers agree.

Legend: S slices, K outputs of the network per pixel, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_store.preprocessing.volume_restore import classes_of
from model_store.task import Task


@dataclass
class _Sums:
    """The sums of one label over all pixels so far; `most` is the largest p while no pixel is the label's."""

    soft: float = 0.0
    hard: int = 0
    shared: float = 0.0
    most: float = 0.0


class SoftDice:
    """Soft Dice confidence of each label (arXiv 2402.10665): the Dice that the answer has by its own
    probabilities. 0 to 1.

        SDC = 2 sum_x p(x) y(x) / (sum_x p(x) + sum_x y(x))

    over all pixels at network resolution. p is the sum of the probabilities of the label's classes, or of a
    task with regions the region's own. y is 1 where the answer has the label, by the rule that makes the
    served mask (`classes_of`), before it is restored and before `keep_largest`.

    Where the answer has no pixel of the label, the quotient is 0 however sure the network is. There it is
    the background's view at its least sure pixel, 1 - max_x p(x), which the probability that the label is
    nowhere cannot exceed. A label that was lost for sure is near 1 as well: the number cannot tell it from
    one that is not there, so a caller who expects the label looks at empty answers first.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._sums = {label: _Sums() for label in task.labels}
        self._classes = {label: task.label_classes(label) for label in task.labels}
        # The outputs that add up to a label's probability.
        self._outputs = (
            {label: (index,) for index, label in enumerate(task.regions)} if task.regions else self._classes
        )

    def add(self, probabilities_SKHW: NDArray[np.float32]) -> None:
        """Take the probabilities of the next slices, or of one plane of a volume: [S, K, H, W]."""
        for probabilities_KHW in probabilities_SKHW:
            classes_HW = classes_of(probabilities_KHW, self._task, "probabilities")
            for label, sums in self._sums.items():
                p_HW = probabilities_KHW[self._outputs[label][0]]
                for output in self._outputs[label][1:]:
                    p_HW = p_HW + probabilities_KHW[output]
                y_HW = _has(classes_HW, self._classes[label])
                sums.soft += float(p_HW.sum())
                if found := int(np.count_nonzero(y_HW)):
                    sums.hard += found
                    # No dot product: BLAS shares it among threads, which cost more than they save.
                    sums.shared += float(np.einsum("hw,hw->", p_HW, y_HW))
                elif not sums.hard:
                    sums.most = max(sums.most, float(p_HW.max(initial=0.0)))

    @property
    def values(self) -> dict[str, float]:
        """By label, over everything added so far; 1 before."""
        found = {
            label: 2 * sums.shared / (sums.soft + sums.hard) if sums.hard else 1 - sums.most
            for label, sums in self._sums.items()
        }
        return {label: min(1.0, max(0.0, value)) for label, value in found.items()}


def agreement(one: NDArray[np.uint8], other: NDArray[np.uint8], task: Task) -> dict[str, float]:
    """Dice between two answers to a scan, class indices of the same shape, by label; 1 where neither has it.

    Two networks that answer a scan alike are more often right than two that do not (Zenk et al., Medical
    Image Analysis 2025). Raises ValueError for answers of different shapes.
    """
    if one.shape != other.shape:
        raise ValueError(
            f"expected two answers on one grid, found shapes {list(one.shape)} and {list(other.shape)}"
        )
    found = {}
    for label in task.labels:
        here, there = (_has(classes, task.label_classes(label)) for classes in (one, other))
        size = int(np.count_nonzero(here)) + int(np.count_nonzero(there))
        found[label] = 2 * int(np.count_nonzero(here & there)) / size if size else 1.0
    return found


def _has(classes: NDArray[np.uint8], members: Sequence[int]) -> NDArray[np.bool_]:
    """Where the class is one of a label's."""
    found: NDArray[np.bool_] = classes == members[0]
    for member in members[1:]:
        found |= classes == member
    return found
