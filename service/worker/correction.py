"""Measure corrections: what a person changed of an answer is counted.

A job of kind `correction` measures all that wait of a hospital and model. The answer is the mask that the
hospital keeps, or the version that answered answers again. The digest of the answer shows that it has the
voxels of the one that was served; made again on another kind of processor a few may differ.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from model_store.errors import LocumStoreError
from model_store.preprocessing import classes_on
from model_store.scan import Scan, decode_mask
from model_store.task import Task
from personalization.errors import PersonalizationError
from personalization.surfaces import surface_distances
from service import observation, shadow
from service.cohorts import cohorts
from service.corrections import kept_answers, rows
from service.corrections.kept_answers import KeptMask
from service.corrections.rows import CorrectionView, LabelChange
from service.database import CohortMask, Observation, Shadow
from service.errors import CohortError, FileDamaged, ScanGone
from service.observation.rows import keyed_with
from service.settings import scan_limits
from service.worker.attempt import Attempt, AttemptOutcome
from service.worker.promotion import promote
from service.worker.repeated import dice_of, repeat

_CANNOT = (LocumStoreError, PersonalizationError, CohortError, ScanGone, FileDamaged)


def run_correction(attempt: Attempt) -> AttemptOutcome:
    """Measure what waits, one after the other. What cannot be measured says why.

    Raises:
        Exception: any error of the work; the runner reports it as the job's reason.
    """
    attempt.set_stage("preparing")
    hospital, model = attempt.job.hospital, attempt.job.model
    assert hospital is not None
    return AttemptOutcome("succeeded", result=measure(attempt, hospital, model))


def measure(attempt: Attempt, hospital: str, model: str) -> dict[str, int]:
    """Measure the corrections that wait of a model's answers; return how many were and could not be."""
    counts = {"measured": 0, "failed": 0}
    while True:
        attempt.check_cancelled()
        with attempt.database.read() as session:
            found = rows.waiting(session, hospital, model)
        if found is None:
            return counts
        attempt.set_stage("measuring", done=sum(counts.values()))
        labels, reason, exact = _measured(attempt, found)
        counts["failed" if labels is None else "measured"] += 1
        with attempt.database.write() as session:
            rows.measured(session, found, labels, reason, exact)
        compare_with_shadow(attempt, found.request)


def compare_with_shadow(attempt: Attempt, request: str) -> None:
    """Where a second version answered a scan that was corrected, too: measure both answers against the mask.

    The mask of an accepted answer is the answer. Both orders occur, so that the later of the two calls this.
    """
    hospital = str(attempt.job.hospital)
    with attempt.database.read() as session:
        answer = shadow.of_request(session, None, request)
        found = rows.find(session, hospital, request)
        row = None if answer is None else session.get(Shadow, answer.shadow)
    if answer is None or row is None or found is None or found.labels is None:
        return
    if found.accepted:
        with attempt.database.write() as session:
            shadow.accepted(session, answer.id)
    else:
        try:
            content, outlined = _kept(attempt, found)
            second = repeat(attempt, content, row.version, answer.choice)
        except _CANNOT:
            return
        drawn = classes_on(second.reading.scan, outlined, second.task)
        dice = dice_of(second.found.classes, drawn, second.task)
        both = {label: (change.dice, dice.get(label)) for label, change in found.labels.items()}
        with attempt.database.write() as session:
            shadow.corrected(session, answer.id, both)
    promote(attempt, row.id)


def _measured(
    attempt: Attempt, found: CorrectionView
) -> tuple[dict[str, LabelChange] | None, str | None, bool | None]:
    """The figures of a correction, or why there are none, and whether the answer is the same to the voxel."""
    try:
        with attempt.database.read() as session:
            keyed = keyed_with(session)
            answer = session.get(Observation, found.observation)
        if answer is None:
            raise ScanGone("the observation of the answer was deleted, so nothing says how it was made")
        if (kept := kept_answers.find(attempt.database, attempt.settings, answer)) is not None:
            task = attempt.settings.open_store().by_digest(answer.version).manifest.task
            drawn = classes_on(kept.scan, _outlined(attempt, found, kept), task)
            return changes(kept.classes, drawn, task, kept.scan), None, True
        if answer.choice is None:
            raise ScanGone(
                "the answer was adapted to its scan by a job, or is of an earlier Locum, so that it cannot "
                "be made again, and the hospital does not keep its mask"
            )
        content, outlined = _kept(attempt, found)
        again = repeat(attempt, content, answer.version, answer.choice)
        scan, classes = again.reading.scan, again.found.classes
        exact = answer.mask is not None and keyed(observation.mask_digest(classes)) == answer.mask
        return changes(classes, classes_on(scan, outlined, again.task), again.task, scan), None, exact
    except _CANNOT as error:
        return None, str(error), None


def _outlined(attempt: Attempt, found: CorrectionView, kept: KeptMask) -> Scan:
    """The decoded mask of a correction. Raises those of `_CANNOT`."""
    if found.cohort is not None:
        return _kept(attempt, found)[1]
    content = kept_answers.read_corrected(attempt.settings, kept, found.mask or "")
    if content is None:
        raise ScanGone("the corrected mask is not kept any more: send it again")
    return decode_mask(content, scan_limits(attempt.settings))


def _kept(attempt: Attempt, found: CorrectionView) -> tuple[bytes, Scan]:
    """The file of the scan, and the decoded mask. Raises those of `_CANNOT`."""
    settings = attempt.settings
    if found.cohort is None or found.scan is None:
        raise ScanGone("the correction came without its scan, and the answered mask is not kept any more")
    with attempt.database.read() as session:
        cohorts.usable(session, found.hospital, found.cohort)
        row = cohorts.named(session, found.cohort, found.scan)
        # The newest mask of the scan: it may have come with another answer to it, or from Draw.
        mask = session.get(CohortMask, row.id)
        if mask is None:
            raise ScanGone("the mask in the cohort was deleted since: send the correction again")
    content = cohorts.file_of(settings, row, row.name).read()
    return content, decode_mask(cohorts.file_of(settings, mask, row.name).read(), scan_limits(settings))


def changes(
    answered: NDArray[np.uint8], drawn: NDArray[np.uint8], task: Task, scan: Scan
) -> dict[str, LabelChange]:
    """What a person changed, by label. Both are class indices [H, W] or [I, J, K] on the scan's own grid."""
    labels = [task.label_classes(label) for label in task.labels]
    before, after = torch.from_numpy(answered.copy()), torch.from_numpy(drawn.copy())
    dice = dice_of(answered, drawn, task)
    spacing = observation.spacing_of(scan)
    surfaces = surface_distances(before, after, labels, None if answered.ndim == 2 else spacing)
    voxel = scan.voxel_volume_ml
    found: dict[str, LabelChange] = {}
    for index, label in enumerate(task.labels):
        one, other = (np.isin(each, labels[index]) for each in (answered, drawn))
        added, removed = int((other & ~one).sum()), int((one & ~other).sum())
        half = bool(one.any()) != bool(other.any())
        found[label] = LabelChange(
            dice=dice[label],
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
