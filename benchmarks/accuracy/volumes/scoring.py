"""What the models of a finished run answer on held-out scans: Dice and surface distances of every patient.

Answers are on the scans' own grid, by the preprocessing, the windows and the way back of the service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from model_store.preprocessing import answer, classes_on, outputs_of, prepare_for
from model_store.scan import Scan
from model_store.task import Task
from personalization.metrics import dice
from personalization.outputs import outputs
from personalization.surfaces import surface_distances
from training.algorithm import ModelDraft
from training.data.cases import Case
from training.data.scan_files import mask_of, read_case
from training.local.networks import network_of
from training.run import Result

CPU = torch.device("cpu")
Change: TypeAlias = Callable[[Scan], Scan]  # what a scanner does to a scan
# patient -> metric -> a value per class, None where it is undefined
Scores: TypeAlias = dict[str, dict[str, list[float | None]]]


def of_members(done: Result) -> dict[str, Scores]:
    """Scores of what every member is served on its test patients: the global model, and a personal one.

    A site that keeps the global model for its personal one has that one's scores.
    """
    drafts = {draft.site: draft for draft in done.publication.models}
    personal = any(drafts) or "personal" in done.publication.details
    models: dict[str, Scores] = {}
    for site in done.run.sites():
        cases = {f"{site.name}/{case.patient}": case for case in site.of_split("test")}
        task = done.run.federation.task
        if None in drafts:
            models.setdefault("global", {}).update(scores_of(network_of_draft(drafts[None]), cases, task))
        if site.name in drafts:
            own = scores_of(network_of_draft(drafts[site.name]), cases, task)
        else:
            own = {name: models["global"][name] for name in cases}
        if personal:
            models.setdefault("personal", {}).update(own)
    return models


def network_of_draft(draft: ModelDraft) -> nn.Module:
    """A published network, ready to answer."""
    return network_of(draft.network, draft.weights, CPU).eval()


@torch.no_grad()
def answered(
    network: nn.Module, case: Case, task: Task, change: Change | None = None
) -> tuple[Tensor, Tensor, tuple[float, ...] | None]:
    """Answer and truth of a case: class indices on the scan's own grid, and its spacing in mm, if it has one.

    `change` is what a scanner does to the scan.
    """
    scan = seen(case, task, change)
    truth = classes_on(scan, mask_of(case), task)
    prepared = prepare_for(task, scan)
    found = answer(
        prepared, task, partial(outputs, network, kind=outputs_of(task), regions=bool(task.regions))
    )
    predicted, true = (torch.from_numpy(np.ascontiguousarray(each)) for each in (found, truth))
    if scan.affine is None:
        return predicted, true, None
    spacing = np.linalg.norm(scan.affine[:3, :3], axis=0) * scan.mm_per_unit
    return predicted, true, tuple(map(float, spacing))


def seen(case: Case, task: Task, change: Change | None = None) -> Scan:
    """The scan of a case, as it is or through a scanner."""
    scan = read_case(case, task)
    return scan if change is None else in_planes(change, scan)


def in_planes(change: Change, scan: Scan) -> Scan:
    """A volume [I, J, K, C] through a scanner of images [H, W, C]: alike in every plane [I, J]."""
    voxels = np.asarray(scan.voxels)
    planes = voxels.reshape(*voxels.shape[:2], -1)
    seen = np.asarray(change(replace(scan, voxels=planes)).voxels)
    return replace(scan, voxels=seen.reshape(voxels.shape))


def scores_of(
    network: nn.Module,
    cases: Mapping[str, Case],
    task: Task,
    change: Change | None = None,
) -> Scores:
    """Dice and surface metrics of each class of every case, on the scans' own grids."""
    found: Scores = {}
    for name, case in cases.items():
        predicted, truth, spacing = answered(network, case, task, change)
        classes = len(task.classes)
        values = {"dice": dice(predicted[None], truth[None], classes)[0, 1:]}
        values |= surface_distances(predicted, truth, [(index,) for index in range(1, classes)], spacing)
        found[name] = {
            metric: [None if math.isnan(value) else round(value, 5) for value in each.tolist()]
            for metric, each in values.items()
        }
    return found
