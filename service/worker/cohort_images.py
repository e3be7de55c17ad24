"""Load the scans and masks of a job's cohort as network input, prepared as in serving."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.errors import LocumStoreError, ScanError
from model_store.guard import ReferenceStatistics, ScanSummary, check, summarise
from model_store.preprocessing import Prepared, prepare, prepare_mask
from model_store.scan import Limits, decode, decode_mask
from model_store.task import Task
from personalization.cancellation import CancelCheck
from personalization.labelled_slices import LabelledSlices
from service.cohorts import cohorts, masks
from service.cohorts.files import ScanFile, label_of
from service.cohorts.patients import numbered, other_values, shows_target
from service.errors import AdaptationRejected
from service.worker.attempt import Attempt


@dataclass(frozen=True)
class LabelledImages:
    """Slices of a cohort, `images` float32 [N, C, H, W], with `targets` uint8 [N, H, W], 0 without a mask.

    `names` has the scan of each slice, `drawn_on` whether that scan has a mask. `statistics` describes the
    scans for the guard. `left_out` is the number of slices beyond MOST_IMAGES.
    """

    images: Tensor
    targets: Tensor
    names: tuple[str, ...]
    drawn_on: NDArray[np.bool_]
    statistics: ReferenceStatistics
    left_out: int

    @property
    def scan_of_image(self) -> NDArray[np.int64]:
        """Index of the scan of each slice [N]."""
        return np.unique(self.names, return_inverse=True)[1].astype(np.int64)

    @property
    def drawn(self) -> dict[str, bool]:
        """Map the scans with masks to whether any of their slices still has a target."""
        shows = self.targets.flatten(1).any(dim=1).tolist()
        found: dict[str, bool] = {}
        for name, drawn_on, there in zip(self.names, self.drawn_on, shows, strict=True):
            if drawn_on:
                found[name] = found.get(name, False) or there
        return found

    def examples(self, scans: Iterable[str], patients: Mapping[str, str], classes: int = 2) -> LabelledSlices:
        """Select every slice of these scans; `patients` has the patient of each."""
        wanted = set(scans)
        chosen = [index for index, name in enumerate(self.names) if name in wanted]
        own = tuple(patients[self.names[index]] for index in chosen)
        return LabelledSlices(self.images[chosen], self.targets[chosen], own, classes)


def masks_of(attempt: Attempt, task: Task) -> tuple[dict[str, ScanFile], frozenset[str]]:
    """Load the masks of the job's cohort by scan name, and find which of them have a target.

    Warns of masks that look like class indices.
    """
    assert attempt.job.cohort is not None
    with attempt.database.read() as session:
        rows = masks.of_cohort(session, attempt.job.cohort)
        digests = {scan.name: scan.sha256 for scan in cohorts.scans(session, attempt.job.cohort)}
    files = {name: cohorts.file_of(attempt.settings, row, name) for name, row in rows.items()}
    if hint := other_values({name: row.label_values for name, row in rows.items()}, digests, task):
        attempt.warn(hint)
    return files, frozenset(name for name, row in rows.items() if shows_target(row.label_values, task))


def load_labelled(
    scans: Sequence[ScanFile],
    drawn: Mapping[str, ScanFile],
    task: Task,
    limits: Limits,
    check_cancelled: CancelCheck,
) -> LabelledImages:
    """Decode and prepare every scan, and its mask if it has one.

    If there are more than MOST_IMAGES slices, those of scans with masks are kept first: only they are used in
    training.

    Raises:
        ScanError, TaskError: a file cannot be read or does not fit; the message has its digest.
        CohortDeleted: a file is not there.
    """
    images, targets, names, drawn_on, statistics, left_out = [], [], [], [], [], 0
    room = MOST_IMAGES
    for file, after in _drawn_first(scans, drawn):
        check_cancelled()
        try:
            scan = decode(file.read(), limits)
            prepared = prepare(scan, task)
            mask = drawn.get(file.name)
            target = np.zeros((len(prepared.slices), *task.size), np.uint8)
            if mask is not None:
                target = prepare_mask(decode_mask(mask.read(), limits), task, prepared.geometry)
        except LocumStoreError as error:
            raise type(error)(f"{label_of(file.sha256)}: {error}") from error
        # An equal share of the slices that the earlier scans left.
        budget = max(1, room // after)
        kept = evenly(slices_of(prepared), budget)
        left_out += len(target) - len(kept)
        room -= len(kept)
        images.append(kept)
        targets.append(evenly(torch.from_numpy(target.copy()), budget))
        names += [file.name] * len(kept)
        drawn_on += [mask is not None] * len(kept)
        statistics.append(summarise(scan, prepared))
    return LabelledImages(
        torch.cat(images), torch.cat(targets), tuple(names), np.array(drawn_on), merged(statistics), left_out
    )


def _drawn_first(scans: Sequence[ScanFile], drawn: Mapping[str, ScanFile]) -> Iterator[tuple[ScanFile, int]]:
    """Yield the scans with masks, then the others.

    Each comes with the number of scans of its group that are left, itself included.
    """
    for kind in (True, False):
        files = [file for file in scans if (file.name in drawn) is kind]
        yield from zip(files, range(len(files), 0, -1), strict=True)


# Most slices that a job adapts to. In a larger cohort every scan contributes up to the same number, evenly
# spaced: some thousand slices represent a hospital's scans well enough, and all of them must fit in memory.
MOST_IMAGES = 2000


@dataclass(frozen=True)
class CohortImages:
    """Slices of a cohort, `images` float32 [N, C, H, W].

    `scan_of_image` [N] is the scan's index of each slice. `patient_of_image` [N] is the patient's, as far as
    the task can derive it from the scans' names. `warned` is the share of scans that the guard warns of,
    `mistaken` of those that no training scan resembles in kind. `statistics` describes the scans for the
    guard. `left_out` is the number of slices beyond MOST_IMAGES.
    """

    images: Tensor
    scan_of_image: NDArray[np.int64]
    patient_of_image: NDArray[np.int64]
    warned: float
    mistaken: float
    statistics: ReferenceStatistics
    left_out: int


def cohort_files(attempt: Attempt) -> list[ScanFile]:
    """List the scans of the job's cohort, by name.

    Raises:
        CohortUnknown, CohortDeleted: the cohort does not exist, or was deleted.
        AdaptationRejected: it is empty.
    """
    job = attempt.job
    assert job.hospital is not None
    assert job.cohort is not None
    with attempt.database.read() as session:
        cohorts.usable(session, job.hospital, job.cohort)
        rows = cohorts.scans(session, job.cohort)
    if not rows:
        raise AdaptationRejected(
            f"cohort {job.cohort} has no scan: upload some, then ask for the adaptation again"
        )
    return [cohorts.file_of(attempt.settings, row, row.name) for row in rows]


def load_images(
    files: Sequence[ScanFile],
    task: Task,
    reference: ReferenceStatistics | None,
    limits: Limits,
    check_cancelled: CancelCheck,
) -> CohortImages:
    """Decode and prepare every scan.

    Raises:
        ScanError: a scan cannot be read or does not fit the task; the message has its digest.
        CohortDeleted: a file is not there.
    """
    budget = max(1, MOST_IMAGES // len(files))
    parts, summaries, total = [], [], 0
    for file in files:
        check_cancelled()
        try:
            scan = decode(file.read(), limits)
            prepared = prepare(scan, task)
        except ScanError as error:
            raise type(error)(f"{label_of(file.sha256)}: {error}") from error
        slices, summary = slices_of(prepared), summarise(scan, prepared)
        total += len(slices)
        parts.append(evenly(slices, budget))
        summaries.append(summary)
    images = torch.cat(parts)
    warnings = [check(summary, reference, task) for summary in summaries]
    patients = numbered([file.name for file in files], task)
    return CohortImages(
        images=images,
        scan_of_image=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
        patient_of_image=np.repeat(patients, [len(part) for part in parts]),
        warned=float(np.mean([bool(found) for found in warnings])),
        mistaken=float(np.mean([any(each.gross for each in found) for found in warnings])),
        statistics=merged(summaries),
        left_out=total - len(images),
    )


def slices_of(prepared: Prepared) -> Tensor:
    """Return a scan's network input [S, C, H, W] as a tensor."""
    # A copy, because slices with neighbours share memory and torch tensors must not.
    return torch.from_numpy(prepared.slices.copy())


def evenly(slices: Tensor, most: int = MOST_IMAGES) -> Tensor:
    """Select at most so many of the slices, evenly spaced."""
    if len(slices) <= most:
        return slices
    return slices[((torch.arange(most) + 0.5) * len(slices) / most).long()]


def merged(summaries: Iterable[ScanSummary]) -> ReferenceStatistics:
    """Merge the guard's summaries of all scans."""
    return reduce(ReferenceStatistics.merge, map(ReferenceStatistics.of, summaries))
