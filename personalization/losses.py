"""The losses of supervised training, by name. To add one, add its function and its line in `LOSSES`.

Targets are class indices [B, ...], of classes that exclude each other, or, of labels that may overlap
(regions), ones and zeros [B, L, ...]: the shape tells them apart. Logits then mean a sigmoid per label.
`dice` and `cross-entropy` are ours, the others MONAI's, summed over the batch as `dice` is.

Legend: B batch, K classes, L labels, H and W height and width, ... one to three spatial axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from personalization.errors import LabelError
from personalization.networks.capabilities import TaskKind

SMOOTHING = 1e-5
# (logits [B, K, ...], class indices [B, ...]) -> scalar
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def soft_dice_loss(logits_BKHW: Tensor, target_BHW: Tensor) -> Tensor:
    """Compute soft Dice over all classes, background included, summed over the whole batch (IOP-FL, 1.2).

    L = 1 - 1/K sum_c (2 sum(p_c g_c) + 1e-5) / (sum p_c + sum g_c + 1e-5), p = softmax(logits), g one-hot.
    The inner sums run over batch and pixels together, so that an image without foreground gives no term 0/0.
    `target` has class indices of any integer type; of regions p is a sigmoid, and g is the target itself. The
    result is a scalar of the logits' type.

    Raises LabelError if the shapes do not match or a target is outside 0..K-1.
    """
    target = _checked(logits_BKHW, target_BHW)
    if target.ndim == logits_BKHW.ndim:
        probability, truth = torch.sigmoid(logits_BKHW), target.to(logits_BKHW.dtype)
    else:
        probability = torch.softmax(logits_BKHW, dim=1)
        truth = functional.one_hot(target, logits_BKHW.shape[1]).movedim(-1, 1).to(probability.dtype)
    axes = (0, *range(2, probability.ndim))
    overlap = (probability * truth).sum(axes)
    total = probability.sum(axes) + truth.sum(axes)
    return 1 - ((2 * overlap + SMOOTHING) / (total + SMOOTHING)).mean()


def cross_entropy(logits_BK: Tensor, target_B: Tensor) -> Tensor:
    """Compute the mean of -log softmax(logits) at the target's class, over images, or over their pixels.

    Of regions it is the mean over labels and pixels of the binary one.
    """
    if target_B.ndim == logits_BK.ndim:
        return functional.binary_cross_entropy_with_logits(logits_BK, target_B.to(logits_BK.dtype))
    return functional.cross_entropy(logits_BK, target_B.long())


def dice_ce_loss(logits_BK: Tensor, target_B: Tensor) -> Tensor:
    """Compute soft Dice plus cross-entropy (Isensee et al., 2021). Raises LabelError as `soft_dice_loss`.

    Dice looks at a target and cross-entropy at every pixel, so that small or absent ones give a gradient too.
    """
    target = _checked(logits_BK, target_B)
    regions = target.ndim == logits_BK.ndim
    dice = _of_monai("DiceLoss", regions)
    if regions:
        return dice(logits_BK, target) + cross_entropy(logits_BK, target)
    return dice(logits_BK, target[:, None]) + cross_entropy(logits_BK, target)


def dice_focal_loss(logits_BK: Tensor, target_B: Tensor) -> Tensor:
    """Compute soft Dice plus the focal loss (Lin et al., 2017). Raises LabelError as `soft_dice_loss`.

    The focal loss is the mean over classes and pixels of -(1 - p)^2 log p at the target's class. MONAI's sum
    of both takes a sigmoid in the second where the first has a softmax; here both have a softmax.
    """
    target = _checked(logits_BK, target_B)
    regions = target.ndim == logits_BK.ndim
    wanted = target if regions else target[:, None]
    return _of_monai("DiceLoss", regions)(logits_BK, wanted) + _of_monai("FocalLoss", regions)(
        logits_BK, wanted
    )


def tversky_loss(logits_BK: Tensor, target_B: Tensor) -> Tensor:
    """Compute 1 - mean_c TP / (TP + 0.3 FP + 0.7 FN) over the batch (Salehi et al., 2017).

    A pixel that is missed costs more than one too many, as in Dice. Raises LabelError as `soft_dice_loss`.
    """
    target = _checked(logits_BK, target_B)
    regions = target.ndim == logits_BK.ndim
    return _of_monai("TverskyLoss", regions)(logits_BK, target if regions else target[:, None])


@cache
def _of_monai(name: str, regions: bool) -> Loss:
    """A loss of MONAI over all classes, and the batch as one."""
    # MONAI takes seconds to import.
    from monai import losses

    how: dict[str, Any] = {} if regions else {"to_onehot_y": True}
    if name == "FocalLoss":
        how |= {"use_softmax": not regions}
    else:
        how |= {"batch": True, "sigmoid": regions, "softmax": not regions}
    if name == "TverskyLoss":
        how |= {"alpha": 0.3, "beta": 0.7}
    found: Loss = getattr(losses, name)(**how)
    return found


def _checked(logits_BK: Tensor, target: Tensor) -> Tensor:
    """The target, int64. Raises LabelError for one that does not fit the logits.

    Values are looked at on the CPU alone: on a GPU the host would wait for them at every step, and a data set
    is checked when it is made.
    """
    classes = logits_BK.shape[1]
    expected = (logits_BK.shape[0], *logits_BK.shape[2:])
    regions = target.ndim == logits_BK.ndim and tuple(target.shape) == tuple(logits_BK.shape)
    if not regions and tuple(target.shape) != expected:
        raise LabelError(f"target: expected shape {list(expected)}, found {list(target.shape)}")
    indices = target.long()
    most = 1 if regions else classes - 1
    if (
        indices.device.type == "cpu"
        and indices.numel()
        and (int(indices.min()) < 0 or int(indices.max()) > most)
    ):
        raise LabelError(
            f"target: expected classes 0..{most}, found {int(indices.min())}..{int(indices.max())}"
        )
    return indices


@dataclass(frozen=True)
class NamedLoss:
    """A loss that a configuration can name, and the kinds of task that it is for."""

    function: Loss
    kinds: tuple[TaskKind, ...]


LOSSES: Mapping[str, NamedLoss] = {
    "dice": NamedLoss(soft_dice_loss, ("segmentation",)),
    "cross-entropy": NamedLoss(cross_entropy, ("segmentation", "classification")),
    "dice_ce": NamedLoss(dice_ce_loss, ("segmentation",)),
    "dice_focal": NamedLoss(dice_focal_loss, ("segmentation",)),
    "tversky": NamedLoss(tversky_loss, ("segmentation",)),
}
DEFAULTS: Mapping[TaskKind, str] = {"segmentation": "dice", "classification": "cross-entropy"}
