"""The losses of supervised training, by name. To add one, add its function and its line in `LOSSES`.

Legend: B batch, K classes, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from personalization.errors import LabelError

SMOOTHING = 1e-5
TaskKind: TypeAlias = Literal["segmentation", "classification"]
# (logits [B, K, ...], class indices [B, ...]) -> scalar
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def soft_dice_loss(logits_BKHW: Tensor, target_BHW: Tensor) -> Tensor:
    """Compute soft Dice over all classes, background included, summed over the whole batch (IOP-FL, 1.2).

    L = 1 - 1/K sum_c (2 sum(p_c g_c) + 1e-5) / (sum p_c + sum g_c + 1e-5), p = softmax(logits), g one-hot.
    The inner sums run over batch and pixels together, so that an image without foreground gives no term 0/0.
    `target` has class indices of any integer type. The result is a scalar of the logits' type.

    Raises LabelError if the shapes do not match or a target is outside 0..K-1.
    """
    classes = logits_BKHW.shape[1]
    expected = (logits_BKHW.shape[0], *logits_BKHW.shape[2:])
    if tuple(target_BHW.shape) != expected:
        raise LabelError(f"target: expected shape {list(expected)}, found {list(target_BHW.shape)}")
    indices = target_BHW.long()
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= classes):
        raise LabelError(
            f"target: expected classes 0..{classes - 1}, found {int(indices.min())}..{int(indices.max())}"
        )
    probability = torch.softmax(logits_BKHW, dim=1)
    truth = functional.one_hot(indices, classes).movedim(-1, 1).to(probability.dtype)
    axes = (0, *range(2, probability.ndim))
    overlap = (probability * truth).sum(axes)
    total = probability.sum(axes) + truth.sum(axes)
    return 1 - ((2 * overlap + SMOOTHING) / (total + SMOOTHING)).mean()


def cross_entropy(logits_BK: Tensor, target_B: Tensor) -> Tensor:
    """Compute the mean of -log softmax(logits) at the target's class, over images, or over their pixels."""
    return functional.cross_entropy(logits_BK, target_B.long())


@dataclass(frozen=True)
class NamedLoss:
    """A loss that a configuration can name, and the kinds of task that it is for."""

    function: Loss
    kinds: tuple[TaskKind, ...]


LOSSES: Mapping[str, NamedLoss] = {
    "dice": NamedLoss(soft_dice_loss, ("segmentation",)),
    "cross-entropy": NamedLoss(cross_entropy, ("segmentation", "classification")),
}
DEFAULTS: Mapping[TaskKind, str] = {"segmentation": "dice", "classification": "cross-entropy"}
