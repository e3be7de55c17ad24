"""The metrics of answers beside the truth: `METRICS`, one line each; Dice per class and sample, accuracy.

The first metric of a kind of task chooses rounds and models. The federated methods measure the others at
every validation, and what shows a metric takes its title, its best and its bounds from here.

Legend: B batch (slices or volumes), K classes, ... any spatial axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from personalization.errors import LabelError
from personalization.networks.capabilities import TaskKind

Empty = Literal["nan", "one", "zero"]
_EMPTY: dict[str, float] = {"nan": float("nan"), "one": 1.0, "zero": 0.0}


def dice(pred: Tensor, gt: Tensor, classes: int, empty: Empty = "nan") -> Tensor:
    """Compute 2|A∩B| / (|A|+|B|) for every sample and class, background (column 0) included: [B, K] float64.

    `pred` and `gt` are class indices [B, ...] of any integer type. If a class is in neither, the value is
    `empty`. The default NaN is to be excluded and counted, because 1 would inflate and 0 deflate a mean.

    Raises LabelError if the shapes differ or a value is outside 0..classes-1.
    """
    overlap, size_pred, size_gt = _counts(pred, gt, classes)
    total = size_pred + size_gt
    value = 2 * overlap / total.clamp(min=1)
    return torch.where(total > 0, value, torch.full_like(value, _EMPTY[empty]))


def dice_by_patient(pred: Tensor, gt: Tensor, patients: Sequence[str], classes: int) -> dict[str, Tensor]:
    """Compute Dice [K] of every patient, with all slices of a patient as one volume; in order of appearance.

    `pred` and `gt` are [N, H, W] class indices and `patients` the N patients the slices belong to.
    """
    if len(patients) != pred.shape[0]:
        raise LabelError(f"patients: expected one name per slice ({pred.shape[0]}), found {len(patients)}")
    result: dict[str, Tensor] = {}
    for patient in dict.fromkeys(patients):
        own = torch.tensor([name == patient for name in patients], device=pred.device)
        result[patient] = dice(pred[own].unsqueeze(0), gt[own].unsqueeze(0), classes)[0]
    return result


def dice_by_label(
    pred: Tensor, gt: Tensor, patients: Sequence[str], labels: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Compute Dice [L] of every patient and label, with all slices of a patient as one volume.

    A label is the union of its classes in `labels`, since labels may overlap. NaN where it is neither in the
    prediction nor in the ground truth. `pred` and `gt` are those of `dice_by_patient`.
    """
    found: dict[str, list[Tensor]] = {}
    for classes in labels:
        members = torch.tensor(tuple(classes), device=pred.device)
        here, there = (torch.isin(each.long(), members).to(torch.uint8) for each in (pred, gt))
        for patient, values in dice_by_patient(here, there, patients, 2).items():
            found.setdefault(patient, []).append(values[1])
    return {patient: torch.stack(values) for patient, values in found.items()}


def foreground_dice(pred: Tensor, gt: Tensor, patients: Sequence[str], classes: int) -> dict[str, float]:
    """Compute every patient's foreground Dice: the mean over classes 1..K-1 of `dice_by_patient` without NaN.

    It is NaN for a patient without foreground in prediction and ground truth.
    """
    by_patient = dice_by_patient(pred, gt, patients, classes)
    return {patient: float(values[1:].nanmean()) for patient, values in by_patient.items()}


@dataclass(frozen=True)
class Compared:
    """One case's answer beside the truth: a patient's class indices [N, ...], or one image's class [1].

    `spacing` has the millimetres between neighbours along each axis, None where it is unknown.
    """

    predicted: Tensor
    truth: Tensor
    classes: int
    spacing: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Metric:
    """A metric, as tables and reports show it.

    Attributes:
        name: in records and manifests, after `val_` and the like.
        title: for columns and captions.
        task: the kind of task that it is for.
        of: of one case; NaN where it is undefined. A mean over cases leaves these out and counts the others.
            None for what is no mean over cases: the method that has it measures it.
        best: whether the highest or the lowest value is best.
        most: the largest value; the least is 0.
    """

    name: str
    title: str
    task: TaskKind
    of: Callable[[Compared], float] | None
    best: Literal["highest", "lowest"] = "highest"
    most: float = 1.0

    @property
    def is_share(self) -> bool:
        """Whether its values are in 0..1."""
        return self.most == 1.0


def _dice_of(case: Compared) -> float:
    """The mean Dice over the classes 1..K-1 that are in answer or truth, all slices as one volume."""
    found = dice(case.predicted.unsqueeze(0), case.truth.unsqueeze(0), case.classes)
    return float(found[0, 1:].nanmean())


def _accuracy_of(case: Compared) -> float:
    return accuracy(case.predicted, case.truth, case.classes)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("dice", "Dice", "segmentation", _dice_of),
        Metric("accuracy", "accuracy", "classification", _accuracy_of),
        Metric("balanced_accuracy", "balanced accuracy", "classification", None),
    )
}


def metrics_of(task: TaskKind) -> tuple[Metric, ...]:
    """The metrics of a kind of task; the first chooses rounds and models."""
    return tuple(metric for metric in METRICS.values() if metric.task == task)


def further_metrics(
    predicted: Tensor, truth: Tensor, cases: Sequence[str], classes: int, task: TaskKind
) -> Mapping[str, dict[str, float]]:
    """Every case's value of each metric but the first: metric -> case -> value.

    `predicted` and `truth` are class indices [N, ...], `cases` the case of each of the N.
    """
    found: dict[str, dict[str, float]] = {}
    for metric in metrics_of(task)[1:]:
        if metric.of is None:
            continue
        values = found[metric.name] = {}
        for case in dict.fromkeys(cases):
            own = torch.tensor([name == case for name in cases])
            values[case] = metric.of(Compared(predicted[own], truth[own], classes))
    return found


def accuracy(pred: Tensor, gt: Tensor, classes: int) -> float:
    """Compute the share of images [N] with the right class; NaN of none. Raises LabelError as `dice`."""
    hits = _hits(pred, gt, classes)
    return float(hits.mean()) if len(hits) else float("nan")


def balanced_accuracy(pred: Tensor, gt: Tensor, classes: int) -> float:
    """Compute the mean over the classes in `gt` [N] of the share of images with the right class; NaN of none.

    A class without images is left out, not counted as 0 or 1.
    """
    hits, labels = _hits(pred, gt, classes), gt.long()
    images = torch.bincount(labels, minlength=classes).double()
    right = torch.bincount(labels, weights=hits, minlength=classes)
    return float((right / images)[images > 0].mean())


def _hits(pred: Tensor, gt: Tensor, classes: int) -> Tensor:
    """Compute the hits [N] float64: 1 for the right class, else 0."""
    if pred.ndim != 1:
        raise LabelError(f"expected one class per image, [N], found shape {list(pred.shape)}")
    _check_labels(pred, gt, classes)
    return (pred == gt).double()


def _counts(pred: Tensor, gt: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Count |A∩B|, |A| and |B|, each [B, K] float64."""
    _check_labels(pred, gt, classes)
    if pred.ndim < 2:
        raise LabelError(f"expected class indices [B, ...], found shape {list(pred.shape)}")
    flat_pred, flat_gt = pred.flatten(1), gt.flatten(1)
    columns = []
    for index in range(classes):
        in_pred, in_gt = flat_pred == index, flat_gt == index
        columns.append(torch.stack([(in_pred & in_gt).sum(1), in_pred.sum(1), in_gt.sum(1)]))
    overlap, size_pred, size_gt = torch.stack(columns, dim=-1).to(torch.float64)
    return overlap, size_pred, size_gt


def _check_labels(pred: Tensor, gt: Tensor, classes: int) -> None:
    if pred.shape != gt.shape:
        raise LabelError(f"prediction: expected shape {list(gt.shape)}, found {list(pred.shape)}")
    for name, labels in (("prediction", pred), ("ground truth", gt)):
        if labels.is_floating_point() or labels.is_complex():
            raise LabelError(f"{name}: expected integer class indices, found {labels.dtype}")
        if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
            raise LabelError(
                f"{name}: expected classes 0..{classes - 1}, found {int(labels.min())}..{int(labels.max())}"
            )
