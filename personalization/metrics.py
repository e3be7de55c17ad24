"""Dice, said precisely: per class and sample, with the empty case decided by the caller.

Legend: B batch (slices or volumes), K classes, ... any spatial axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from personalization.errors import LabelError

Empty = Literal["nan", "one", "zero"]
_EMPTY: dict[str, float] = {"nan": float("nan"), "one": 1.0, "zero": 0.0}


def dice(pred: Tensor, gt: Tensor, classes: int, empty: Empty = "nan") -> Tensor:
    """2|A∩B| / (|A|+|B|) of every sample and class, background (column 0) included: [B, K] float64.

    `pred` and `gt` are class indices [B, ...] of any integer type. Where a class is in neither, the value
    is `empty`: NaN by default, to be excluded and counted, since 1 would inflate and 0 deflate a mean.

    Raises LabelError when the shapes differ or a value lies outside 0..classes-1.
    """
    overlap, size_pred, size_gt = _counts(pred, gt, classes)
    total = size_pred + size_gt
    value = 2 * overlap / total.clamp(min=1)
    return torch.where(total > 0, value, torch.full_like(value, _EMPTY[empty]))


def dice_official(pred: Tensor, gt: Tensor, classes: int) -> float:
    """`dice_coef` of IOP-FL's public code, for one batch of slices (1.2): for parity with its tables only.

    2|A∩B| / (|A|+|B|+1e-5), mean over samples, mean over classes **including background**; a class in
    neither counts 0. With a background near 0.99 it lies far above the foreground Dice.
    """
    overlap, size_pred, size_gt = _counts(pred, gt, classes)
    return float((2 * overlap / (size_pred + size_gt + 1e-5)).mean(dim=0).mean())


def dice_by_patient(
    pred: Tensor, gt: Tensor, patients: Sequence[str], classes: int, empty: Empty = "nan"
) -> dict[str, Tensor]:
    """Dice [K] of every patient, all of a patient's slices counted as one volume; in order of appearance.

    `pred` and `gt` are [N, H, W] class indices and `patients` the N patients the slices belong to.
    """
    if len(patients) != pred.shape[0]:
        raise LabelError(f"patients: expected one name per slice ({pred.shape[0]}), found {len(patients)}")
    result: dict[str, Tensor] = {}
    for patient in dict.fromkeys(patients):
        own = torch.tensor([name == patient for name in patients], device=pred.device)
        result[patient] = dice(pred[own].unsqueeze(0), gt[own].unsqueeze(0), classes, empty)[0]
    return result


def foreground_dice(
    pred: Tensor, gt: Tensor, patients: Sequence[str], classes: int, empty: Empty = "nan"
) -> dict[str, float]:
    """Foreground Dice of every patient: the mean over classes 1..K-1 of `dice_by_patient`, NaN left out.

    NaN for a patient in whom neither prediction nor truth has any foreground.
    """
    by_patient = dice_by_patient(pred, gt, patients, classes, empty)
    return {patient: float(values[1:].nanmean()) for patient, values in by_patient.items()}


def _counts(pred: Tensor, gt: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """|A∩B|, |A| and |B|, each [B, K] float64."""
    if pred.shape != gt.shape:
        raise LabelError(f"prediction has shape {list(pred.shape)}, ground truth {list(gt.shape)}")
    if pred.ndim < 2:
        raise LabelError(f"expected class indices [B, ...], found shape {list(pred.shape)}")
    for name, labels in (("prediction", pred), ("ground truth", gt)):
        if labels.is_floating_point() or labels.is_complex():
            raise LabelError(f"{name}: expected integer class indices, found {labels.dtype}")
        if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
            raise LabelError(
                f"{name}: expected classes 0..{classes - 1}, found {int(labels.min())}..{int(labels.max())}"
            )
    flat_pred, flat_gt = pred.flatten(1), gt.flatten(1)
    columns = []
    for index in range(classes):
        in_pred, in_gt = flat_pred == index, flat_gt == index
        columns.append(torch.stack([(in_pred & in_gt).sum(1), in_pred.sum(1), in_gt.sum(1)]))
    overlap, size_pred, size_gt = torch.stack(columns, dim=-1).to(torch.float64)
    return overlap, size_pred, size_gt
