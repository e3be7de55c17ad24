"""Load the scans and masks of a job's cohort as network input, prepared as in serving.

A network of slices gets slices. One of volumes gets patches side by side, each of the sides of its window.
One scan is prepared at a time, and what is kept of all of them is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.errors import LocumStoreError, ScanError
from model_store.guard import ReferenceStatistics, ScanSummary, summarise
from model_store.preprocessing import (
    Prepared,
    PreparedVolume,
    prepare_for,
    prepare_mask,
    prepare_volume_mask,
)
from model_store.preprocessing.windows import cut, evenly_drawn, tiles
from model_store.scan import Limits, Scan, decode, decode_mask
from model_store.task import IGNORED, Task
from model_store.unlike import CohortKinds, kinds_of
from personalization.cancellation import CancelCheck
from personalization.labelled_slices import LabelledSlices
from service.cohorts import cohorts, masks
from service.cohorts.files import ScanFile, label_of
from service.cohorts.patients import numbered, other_values, shows_target
from service.errors import AdaptationRejected
from service.inference.volumes import all_windows, is_taken_together
from service.worker.attempt import Attempt


@dataclass(frozen=True)
class LabelledImages:
    """Slices of a cohort, `images` float32 [N, C, H, W], with `targets` uint8 [N, H, W], 0 without a mask.

    Of volumes patches, [N, C, X, Y, Z]. `names` has the scan of each slice, `drawn_on` whether that scan has
    a mask. `kinds` and `statistics` are those of `CohortImages`. `left_out` is the number of slices beyond
    `most_images`.
    """

    images: Tensor
    targets: Tensor
    names: tuple[str, ...]
    drawn_on: NDArray[np.bool_]
    kinds: CohortKinds
    statistics: ReferenceStatistics | None
    left_out: int

    @property
    def drawn(self) -> dict[str, bool]:
        """Map the scans with masks to whether any of their slices still has a target."""
        known = self.targets.masked_fill(self.targets == IGNORED, 0)
        shows = known.flatten(1).any(dim=1).tolist()
        found: dict[str, bool] = {}
        for name, drawn_on, there in zip(self.names, self.drawn_on, shows, strict=True):
            if drawn_on:
                found[name] = found.get(name, False) or there
        return found

    def examples(self, scans: Iterable[str], patients: Mapping[str, str], task: Task) -> LabelledSlices:
        """Select every slice of these scans; `patients` has the patient of each."""
        wanted = set(scans)
        chosen = [index for index, name in enumerate(self.names) if name in wanted]
        own = tuple(patients[self.names[index]] for index in chosen)
        mirror = () if task.geometry is None else tuple(task.geometry.mirror)
        return LabelledSlices(self.images[chosen], self.targets[chosen], own, len(task.classes), mirror)


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
    reference: ReferenceStatistics | None,
    limits: Limits,
    check_cancelled: CancelCheck,
    *,
    include: bool = False,
) -> LabelledImages:
    """Decode and prepare every scan, and its mask if it has one; leave scans out as `load_images`.

    If there are more slices than `most_images`, those of scans with masks are kept first: only they are used
    in training.

    Raises:
        ScanError, TaskError: a file cannot be read or does not fit; the message has its digest.
        CohortDeleted: a file is not there.
    """
    found: dict[str, tuple[Tensor, Tensor, int, ScanSummary]] = {}
    room = most_images(task)
    for file, after in _drawn_first(scans, drawn):
        check_cancelled()
        try:
            # An equal share of the slices that the earlier scans left.
            seen = ScanInput.of(file.read(), task, limits, max(1, room // after))
            mask = drawn.get(file.name)
            alone = replace(limits, max_channels=1)
            target = seen.targets(None if mask is None else decode_mask(mask.read(), alone))
        except LocumStoreError as error:
            raise type(error)(f"{label_of(file.sha256)}: {error}") from error
        kept = seen.images()
        room -= len(kept)
        found[file.name] = (kept, target, seen.count, summarise(seen.scan, seen.prepared))
    summaries = [found[file.name][3] for file in scans]
    kinds = _judged(summaries, reference, task, include=include)
    used = {file.name for file, fits in zip(scans, kinds.used, strict=True) if fits}
    parts = {name: part for name, part in found.items() if name in used}
    names = tuple(name for name, part in parts.items() for _ in part[0])
    return LabelledImages(
        images=torch.cat([part[0] for part in parts.values()]),
        targets=torch.cat([part[1] for part in parts.values()]),
        names=names,
        drawn_on=np.array([name in drawn for name in names]),
        kinds=kinds,
        statistics=_learned(summaries, kinds, reference, include=include),
        left_out=sum(part[2] for part in parts.values()) - len(names),
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
# Of volumes: most values of all patches together, 256 MiB.
MOST_VALUES = 2**26


def most_images(task: Task) -> int:
    """Most slices, or patches of volumes, that a job adapts to."""
    if not task.is_volume:
        return MOST_IMAGES
    return max(1, MOST_VALUES // (task.in_channels * math.prod(task.input_shape)))


@dataclass(frozen=True)
class ScanInput:
    """One scan as its network sees it: `count` slices, or patches side by side, of which `most` are used."""

    scan: Scan
    prepared: Prepared | PreparedVolume
    task: Task
    most: int

    @classmethod
    def of(cls, content: bytes, task: Task, limits: Limits, most: int) -> ScanInput:
        """Decode and prepare a scan. Raises ScanError."""
        scan = decode(content, limits)
        return cls(scan, prepare_for(task, scan), task, most)

    @property
    def count(self) -> int:
        """Number of slices or patches that there are."""
        prepared = self.prepared
        if isinstance(prepared, PreparedVolume):
            return len(tiles(prepared.grid.shape, self.task.input_shape))
        return len(prepared.slices)

    def images(self) -> Tensor:
        """Those that are used, evenly spaced, float32 [n, C, ...]."""
        prepared = self.prepared
        if isinstance(prepared, PreparedVolume):
            return patches_of(prepared.volume, self.task, self.most)
        return evenly(slices_of(prepared), self.most)

    def targets(self, mask: Scan | None) -> Tensor:
        """Class indices of the same, uint8 [n, ...]; 0 without a mask. Raises TaskError, ScanError."""
        prepared, task = self.prepared, self.task
        if isinstance(prepared, PreparedVolume):
            classes = np.zeros(prepared.volume.shape[1:], np.uint8)
            if mask is not None:
                classes = prepare_volume_mask(mask, task, prepared.grid)
            return patches_of(classes, task, self.most)
        target = np.zeros((len(prepared.slices), *task.size), np.uint8)
        if mask is not None:
            target = prepare_mask(mask, task, prepared.geometry)
        return evenly(torch.from_numpy(target.copy()), self.most)


@dataclass(frozen=True)
class CohortImages:
    """Slices of a cohort, `images` float32 [N, C, H, W], or patches of volumes, [N, C, X, Y, Z].

    `scan_of_image` [N] is the index of each slice's scan among those that are used. `patient_of_image` [N] is
    the patient's, as far as the task can derive it from the scans' names. `kinds` is the guard's verdict on
    every scan of the cohort, in the order of its files. `statistics` describes for the guard the scans that
    it does not warn of; None where there are none. `left_out` is the number of slices beyond `most_images`.
    """

    images: Tensor
    scan_of_image: NDArray[np.int64]
    patient_of_image: NDArray[np.int64]
    kinds: CohortKinds
    statistics: ReferenceStatistics | None
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
    *,
    include: bool = False,
) -> CohortImages:
    """Decode and prepare every scan; leave out those that are unlike the others or the task.

    With `include` none is left out, and the statistics are those of all of them.

    Raises:
        ScanError: a scan cannot be read or does not fit the task; the message has its digest.
        CohortDeleted: a file is not there.
    """
    budget = max(1, most_images(task) // len(files))
    parts, counts, summaries = [], [], []
    for file in files:
        check_cancelled()
        try:
            seen = ScanInput.of(file.read(), task, limits, budget)
        except ScanError as error:
            raise type(error)(f"{label_of(file.sha256)}: {error}") from error
        parts.append(seen.images())
        counts.append(seen.count)
        summaries.append(summarise(seen.scan, seen.prepared))
    kinds = _judged(summaries, reference, task, include=include)
    used = [index for index, fits in enumerate(kinds.used) if fits]
    images = torch.cat([parts[index] for index in used])
    lengths = [len(parts[index]) for index in used]
    patients = numbered([files[index].name for index in used], task)
    return CohortImages(
        images=images,
        scan_of_image=np.repeat(np.arange(len(used)), lengths),
        patient_of_image=np.repeat(patients, lengths),
        kinds=kinds,
        statistics=_learned(summaries, kinds, reference, include=include),
        left_out=sum(counts[index] for index in used) - len(images),
    )


def _judged(
    summaries: Sequence[ScanSummary], reference: ReferenceStatistics | None, task: Task, *, include: bool
) -> CohortKinds:
    found = kinds_of(summaries, reference, task)
    return replace(found, used=np.ones(len(summaries), dtype=bool)) if include else found


def _learned(
    summaries: Sequence[ScanSummary],
    kinds: CohortKinds,
    reference: ReferenceStatistics | None,
    *,
    include: bool,
) -> ReferenceStatistics | None:
    """What the guard may learn: never of a scan that it warned of, unless a person included it."""
    known = kinds.used & (include | ~kinds.warned)
    found = [
        ReferenceStatistics.of(summary, reference)
        for summary, fits in zip(summaries, known, strict=True)
        if fits
    ]
    return reduce(ReferenceStatistics.merge, found) if found else None


def seen(prepared: Prepared | PreparedVolume, task: Task) -> Tensor:
    """What a network is adapted to of one scan, float32 [n, C, ...]: its slices, or patches of a volume.

    A small volume gives the windows by which it is answered, so that a graph which adapts as it runs says
    the same; a larger one patches side by side.
    """
    if not isinstance(prepared, PreparedVolume):
        return evenly(slices_of(prepared))
    if is_taken_together(prepared.grid, task):
        return torch.from_numpy(all_windows(prepared, task))
    return patches_of(prepared.volume, task, most_images(task))


def patches_of(values: NDArray[Any], task: Task, most: int) -> Tensor:
    """At most `most` patches [n, ..., X, Y, Z] of a volume [..., X, Y, Z], evenly spaced."""
    patch = task.input_shape
    corners = tiles(values.shape[-len(patch) :], patch)
    chosen = (corners[index] for index in evenly_drawn(len(corners), most))
    return torch.from_numpy(np.stack([cut(values, corner, patch) for corner in chosen]))


def slices_of(prepared: Prepared) -> Tensor:
    """Return a scan's network input [S, C, H, W] as a tensor."""
    # A copy, because slices with neighbours share memory and torch tensors must not.
    return torch.from_numpy(prepared.slices.copy())


def evenly(slices: Tensor, most: int = MOST_IMAGES) -> Tensor:
    """Select at most so many of the slices, evenly spaced."""
    if len(slices) <= most:
        return slices
    return slices[((torch.arange(most) + 0.5) * len(slices) / most).long()]


def widened(known: ReferenceStatistics | None, own: ReferenceStatistics | None) -> ReferenceStatistics | None:
    """What the guard of a candidate knows: the training scans, and the hospital's that it did not warn of."""
    return known if known is None or own is None else known.merge(own)
