"""Measure corrections: the version that answered answers again, and what a person changed is counted.

A job of kind `correction` measures all that wait of a hospital and model. The digest of the answer shows that
it has the voxels of the one that was served; on another kind of processor a few may differ.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from model_store.errors import LocumStoreError
from model_store.manifest import GRAPH
from model_store.preprocessing import classes_on
from model_store.scan import Scan, decode_mask
from model_store.task import Task
from personalization.metrics import dice_by_label
from personalization.surfaces import surface_distances
from service import observation
from service.catalog.network import chosen_before
from service.cohorts import cohorts
from service.corrections import rows
from service.corrections.rows import CorrectionView, LabelChange
from service.database import CohortMask, Observation
from service.errors import CohortError, FileDamaged, ScanGone
from service.inference.pipeline import Stopwatch, read, segment
from service.observation.rows import keyed_with
from service.settings import cohort_limits, scan_limits
from service.worker.attempt import Attempt, AttemptOutcome
from service.worker.pictures import load


def run_correction(attempt: Attempt) -> AttemptOutcome:
    """Measure what waits, one after the other. What cannot be measured says why.

    Raises:
        Exception: any error of the work; the runner reports it as the job's reason.
    """
    attempt.set_stage("preparing")
    hospital, model = attempt.job.hospital, attempt.job.model
    assert hospital is not None
    counts = {"measured": 0, "failed": 0}
    while True:
        attempt.check_cancelled()
        with attempt.database.read() as session:
            found = rows.waiting(session, hospital, model)
        if found is None:
            return AttemptOutcome("succeeded", result=counts)
        attempt.set_stage("measuring", done=sum(counts.values()))
        labels, reason, exact = _measured(attempt, found)
        counts["failed" if labels is None else "measured"] += 1
        with attempt.database.write() as session:
            rows.measured(session, found, labels, reason, exact)


def _measured(
    attempt: Attempt, found: CorrectionView
) -> tuple[dict[str, LabelChange] | None, str | None, bool | None]:
    """The figures of a correction, or why there are none, and whether the answer is the same to the voxel."""
    try:
        answered, drawn, scan, task, exact = _answer_again(attempt, found)
    except (LocumStoreError, CohortError, ScanGone, FileDamaged) as error:
        return None, str(error), None
    return changes(answered, drawn, task, scan), None, exact


def _answer_again(
    attempt: Attempt, found: CorrectionView
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Scan, Task, bool]:
    settings, store = attempt.settings, attempt.settings.open_store()
    assert found.cohort is not None
    assert found.scan is not None
    with attempt.database.read() as session:
        keyed = keyed_with(session)
        answer = session.get(Observation, found.observation)
        if answer is None:
            raise ScanGone("the observation of the answer was deleted, so nothing says how it was made")
        cohorts.usable(session, found.hospital, found.cohort)
        row = cohorts.named(session, found.cohort, found.scan)
        mask = session.get(CohortMask, row.id)
        if mask is None or mask.sha256 != found.mask:
            raise ScanGone("the mask in the cohort was changed or deleted since: send the correction again")
    content = cohorts.file_of(settings, row, row.name).read()
    outlined = decode_mask(cohorts.file_of(settings, mask, row.name).read(), scan_limits(settings))
    if answer.choice is None:
        raise ScanGone(
            "the answer was adapted to its scan by a job, or is of an earlier Locum, so that it cannot be "
            "made again"
        )
    choice = dict(answer.choice)
    routing = choice.pop("routing", None)
    fields = ("site", "hospital", "cluster", "unknown_site", "fingerprint")
    selection = chosen_before(store, answer.version, {"why": "", **dict.fromkeys(fields), **choice})
    task, watch = selection.manifest.task, Stopwatch()
    reading = read(content, selection.manifest, cohort_limits(settings, task), watch, lens=selection.lens())
    graph = load(selection.model.read(GRAPH), settings)
    answered = segment(
        reading,
        selection.manifest,
        graph,
        watch,
        "slice" if routing == "slice" else "scan",
        between=attempt.between,
    ).classes
    exact = answer.mask is not None and keyed(observation.mask_digest(answered)) == answer.mask
    return answered, classes_on(reading.scan, outlined, task), reading.scan, task, exact


def changes(
    answered: NDArray[np.uint8], drawn: NDArray[np.uint8], task: Task, scan: Scan
) -> dict[str, LabelChange]:
    """What a person changed, by label. Both are class indices [H, W] or [I, J, K] on the scan's own grid."""
    labels = [task.label_classes(label) for label in task.labels]
    before, after = torch.from_numpy(answered.copy()), torch.from_numpy(drawn.copy())
    dice = dice_by_label(before.flatten()[None], after.flatten()[None], ["scan"], labels)["scan"]
    spacing = observation.spacing_of(scan)
    surfaces = surface_distances(before, after, labels, None if answered.ndim == 2 else spacing)
    voxel = scan.voxel_volume_ml
    found: dict[str, LabelChange] = {}
    for index, label in enumerate(task.labels):
        one, other = (np.isin(each, labels[index]) for each in (answered, drawn))
        added, removed = int((other & ~one).sum()), int((one & ~other).sum())
        half = bool(one.any()) != bool(other.any())
        found[label] = LabelChange(
            dice=_number(dice[index]),
            surface_dice=0.0 if half else _number(surfaces["nsd"][index]),
            hd95=_number(surfaces["hd95"][index]),
            added_voxels=added,
            removed_voxels=removed,
            added_ml=None if voxel is None else added * voxel,
            removed_ml=None if voxel is None else removed * voxel,
        )
    return found


def _number(value: torch.Tensor) -> float | None:
    return None if bool(value.isnan()) else float(value)
