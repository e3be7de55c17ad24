"""Answer a scan once more, by the choice of the network that an observation keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model_store.manifest import GRAPH
from model_store.task import Task
from personalization.metrics import dice_by_label
from service.catalog.adapted import origin_of
from service.catalog.network import Selection, chosen_before
from service.inference.pipeline import PreparedScan, Segmentation, Stopwatch, read, segment
from service.inference.pool import PickUnit
from service.inference.shift import Reference
from service.settings import cohort_limits
from service.worker.attempt import Attempt
from service.worker.pictures import load

_FIELDS = ("site", "hospital", "cluster", "unknown_site", "fingerprint")


@dataclass(frozen=True)
class Repeated:
    """An answer that was made again: the scan, and what the network found."""

    reading: PreparedScan
    found: Segmentation
    task: Task


def repeat(attempt: Attempt, content: bytes, version: str, choice: Mapping[str, str | None]) -> Repeated:
    """Answer a scan, by the digest of the version and `Observed.choice`. On the same kind of processor, the
    mask is the same.

    Raises ScanError, StoreError: the scan cannot be read, or the version was withdrawn.
    """
    store, fields = attempt.settings.open_store(), dict(choice)
    routing = fields.pop("routing", None)
    selection = chosen_before(store, version, {"why": "", **dict.fromkeys(_FIELDS), **fields})
    return answered(attempt, content, selection, routing)


def answered(attempt: Attempt, content: bytes, selection: Selection, routing: str | None) -> Repeated:
    """Answer a scan by a network that was chosen. Raises as `repeat`."""
    task, watch = selection.manifest.task, Stopwatch()
    reading = read(
        content, selection.manifest, cohort_limits(attempt.settings, task), watch, lens=selection.lens()
    )
    behind = origin_of(attempt.settings.open_store(), selection.offered)
    session = load(selection.model.read(GRAPH), attempt.settings, Reference.of(behind, selection.model))
    unit: PickUnit = "slice" if routing == "slice" else "scan"
    found = segment(reading, selection.manifest, session, watch, unit, between=attempt.between)
    return Repeated(reading, found, task)


def dice_of(one: NDArray[np.uint8], other: NDArray[np.uint8], task: Task) -> Mapping[str, float | None]:
    """Dice of two masks by label; None where neither has voxels."""
    first, second = (torch.from_numpy(each.copy()).flatten()[None] for each in (one, other))
    classes = [task.label_classes(label) for label in task.labels]
    values = dice_by_label(first, second, ["scan"], classes)["scan"]
    return {
        label: None if bool(value.isnan()) else float(value)
        for label, value in zip(task.labels, values, strict=True)
    }
