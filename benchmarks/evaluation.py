"""Dice as a hospital would see it: on the scan's own grid, prepared and restored as serving does."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from model_store.preprocessing import class_map, prepare, restore
from model_store.scan import decode
from model_store.task import Task
from personalization.metrics import dice
from training.data.cases import Case

BATCH = 16


def patient_dice(network: nn.Module, cases: Iterable[Case], task: Task) -> dict[str, float]:
    """Foreground Dice of every patient, over all voxels of all its scans at once; NaN where there is nothing.

    Mean over the task's foreground classes. `network` gives logits and is put into evaluation mode.
    """
    voxels: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for case in cases:
        scan = decode(case.image.read_bytes())
        prepared = prepare(scan, task)
        probabilities = _probabilities(network, torch.tensor(prepared.slices))
        predicted = torch.tensor(restore(probabilities.numpy(), prepared.geometry))
        truth = torch.tensor(class_map(decode(case.mask.read_bytes()), task))
        voxels.setdefault(case.patient, []).append((predicted.flatten(), truth.flatten()))
    classes = len(task.classes)
    return {patient: _dice(pairs, classes) for patient, pairs in sorted(voxels.items())}


@torch.no_grad()
def _probabilities(network: nn.Module, slices_SCHW: Tensor) -> Tensor:
    network.eval()
    device = next(network.parameters()).device
    parts = [torch.softmax(network(part.to(device)), dim=1).cpu() for part in torch.split(slices_SCHW, BATCH)]
    return torch.cat(parts)


def _dice(pairs: list[tuple[Tensor, Tensor]], classes: int) -> float:
    predicted, truth = (torch.cat(parts).unsqueeze(0) for parts in zip(*pairs, strict=True))
    value = float(dice(predicted, truth, classes)[0, 1:].nanmean())
    return value if math.isfinite(value) else math.nan
