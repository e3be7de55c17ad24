"""Scans of a cohort, answered as the service answers them, beside the masks that were drawn.

What a gate says of Dice is what `/segment` would give: the whole scan, its windows and mirrored passes, on
its own grid, beside the mask as it was drawn. So are the masks that must be plausible.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from model_store.errors import LocumStoreError
from model_store.preprocessing import Prepared, PreparedVolume, answer, classes_on, outputs_of, prepare_for
from model_store.scan import decode, decode_mask
from model_store.task import IGNORED, Task
from personalization.masks import patient_dice
from personalization.outputs import outputs
from service.cohorts.files import ScanFile, label_of
from service.settings import cohort_limits, scan_limits
from service.worker.attempt import Attempt
from service.worker.kept import Kept

# Scans without a mask that are answered: so many at least, and more for so many runs of the network.
_FEWEST, _MOST_RUNS = 8, 2000
# The fractional part of the golden ratio, by which the first few of many are evenly spread.
_GOLDEN = 0.6180339887

Classes = NDArray[np.uint8]


class _Read(NamedTuple):
    prepared: Prepared | PreparedVolume
    truth: Classes | None


class AnsweredScans:
    """The scans of a job, with the masks of some by the names of their scans."""

    def __init__(
        self, attempt: Attempt, task: Task, scans: Sequence[ScanFile], masks: Mapping[str, ScanFile]
    ) -> None:
        self._attempt, self._task, self._masks = attempt, task, masks
        self._scans = {scan.name: scan for scan in scans}
        self._kept = Kept(self._read, _bytes)
        self._runs = 0

    def dice(
        self, patient_of: Mapping[str, str], network: nn.Module, patients: Collection[str]
    ) -> dict[str, float]:
        """The `patient_dice` of each of these patients; `patient_of` has that of each scan with a mask.

        Raises ScanError, TaskError, CohortDeleted.
        """
        pairs: dict[str, list[tuple[Classes, Classes]]] = {}
        for name, patient in patient_of.items():
            if patient in patients:
                found, truth = self._answered(network, name)
                assert truth is not None
                pairs.setdefault(patient, []).append((found, truth))
        classes = len(self._task.classes)
        return {patient: patient_dice(scans, classes) for patient, scans in pairs.items()}

    def beside_drawn(
        self, network: nn.Module, names: Collection[str]
    ) -> Iterator[tuple[Classes, Classes | None]]:
        """The answer to each of these scans and the mask that was drawn, with background where it is unknown.

        Of many scans without a mask, or large ones, some are answered, evenly spread. Raises as `dice`.
        """
        for _, found, drawn in self.drawn(network, names):
            yield found, drawn
        self._runs = 0
        others = [name for name in self._scans if name in names and name not in self._masks]
        for number, index in enumerate(sorted(range(len(others)), key=lambda index: index * _GOLDEN % 1)):
            if number >= _FEWEST and self._runs >= _MOST_RUNS:
                return
            yield self._answered(network, others[index])

    def drawn(self, network: nn.Module, names: Collection[str]) -> Iterator[tuple[str, Classes, Classes]]:
        """Those of them that have a mask: name, answer and mask. Raises as `dice`."""
        for name in self._scans:
            if name in names and name in self._masks:
                found, truth = self._answered(network, name)
                assert truth is not None
                yield name, found, np.where(truth == IGNORED, np.uint8(0), truth)

    def _answered(self, network: nn.Module, name: str) -> tuple[Classes, Classes | None]:
        prepared, truth = self._kept[name]
        return answer(prepared, self._task, partial(self._run, network.eval())), truth

    def _run(self, network: nn.Module, images: NDArray[np.float32]) -> NDArray[np.float32]:
        self._attempt.check_cancelled()
        self._runs += len(images)
        return outputs(network, images, outputs_of(self._task), regions=bool(self._task.regions))

    def _read(self, name: str) -> _Read:
        settings, task = self._attempt.settings, self._task
        scan, mask = self._scans[name], self._masks.get(name)
        try:
            decoded = decode(scan.read(), cohort_limits(settings, task))
            truth = None
            if mask is not None:
                truth = classes_on(decoded, decode_mask(mask.read(), scan_limits(settings)), task)
            return _Read(prepare_for(task, decoded), truth)
        except LocumStoreError as error:
            raise type(error)(f"{label_of(scan.sha256)}: {error}") from error


def _bytes(read: _Read) -> int:
    prepared, truth = read
    inside = prepared.volume if isinstance(prepared, PreparedVolume) else prepared.slices
    return inside.nbytes + (0 if truth is None else truth.nbytes)
