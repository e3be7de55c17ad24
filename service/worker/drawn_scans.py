"""Scans of a cohort with masks, answered and scored as the service answers them.

What a gate says of Dice is what `/segment` would give: the whole scan, its windows and mirrored passes, on
its own grid, beside the mask as it was drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import nn

from model_store.errors import LocumStoreError
from model_store.preprocessing import Prepared, PreparedVolume, answer, classes_on, outputs_of, prepare_for
from model_store.scan import decode, decode_mask
from model_store.task import Task
from personalization.masks import patient_dice
from personalization.outputs import outputs
from service.cohorts.files import ScanFile, label_of
from service.settings import cohort_limits, scan_limits
from service.worker.attempt import Attempt

# Bytes of prepared scans that are kept for the next network; the others are read again.
_MOST_KEPT = 2**28

_Read = tuple[Prepared | PreparedVolume, NDArray[np.uint8]]


class DrawnScans:
    """The `scans` that have masks, by the patients of their names."""

    def __init__(
        self,
        attempt: Attempt,
        task: Task,
        scans: Sequence[ScanFile],
        masks: Mapping[str, ScanFile],
        patients: Mapping[str, str],
    ) -> None:
        self._attempt, self._task = attempt, task
        self._scans = [scan for scan in scans if scan.name in patients]
        self._masks, self._patients = masks, patients
        self._kept: dict[str, _Read] = {}
        self._room = _MOST_KEPT

    def dice(self, network: nn.Module, patients: Collection[str]) -> dict[str, float]:
        """The `patient_dice` of each of these patients. Raises ScanError, TaskError, CohortDeleted."""
        run = partial(self._run, network.eval())
        pairs: dict[str, list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]] = {}
        for scan in self._scans:
            patient = self._patients[scan.name]
            if patient in patients:
                prepared, truth = self._read(scan)
                pairs.setdefault(patient, []).append((answer(prepared, self._task, run), truth))
        classes = len(self._task.classes)
        return {patient: patient_dice(scans, classes) for patient, scans in pairs.items()}

    def _run(self, network: nn.Module, images: NDArray[np.float32]) -> NDArray[np.float32]:
        self._attempt.check_cancelled()
        return outputs(network, images, outputs_of(self._task), regions=bool(self._task.regions))

    def _read(self, scan: ScanFile) -> _Read:
        if scan.name in self._kept:
            return self._kept[scan.name]
        settings, task = self._attempt.settings, self._task
        try:
            decoded = decode(scan.read(), cohort_limits(settings, task))
            mask = decode_mask(self._masks[scan.name].read(), scan_limits(settings))
            found = prepare_for(task, decoded), classes_on(decoded, mask, task)
        except LocumStoreError as error:
            raise type(error)(f"{label_of(scan.sha256)}: {error}") from error
        inside = found[0].volume if isinstance(found[0], PreparedVolume) else found[0].slices
        self._room -= inside.nbytes + found[1].nbytes
        if self._room >= 0:
            self._kept[scan.name] = found
        return found
