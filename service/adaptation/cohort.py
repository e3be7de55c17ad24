"""The scans of a job as the network's input: read, checked, prepared as serving prepares them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.errors import ScanError
from model_store.guard import ReferenceStatistics, ScanSummary, check, summarise
from model_store.preprocessing import prepare
from model_store.scan import Limits, decode
from model_store.task import Task
from personalization.tick import Tick
from service.adaptation.attempt import Attempt
from service.errors import AdaptationRefused
from service.jobs import cohorts
from service.jobs.cohort_files import ScanFile
from service.patients import numbered

# Slices that are adapted to. Of a larger cohort every scan gives as many, evenly spaced: some thousand
# slices tell what a hospital's scans look like, and all of them have to be in memory.
MOST_IMAGES = 2000


@dataclass(frozen=True)
class CohortImages:
    """`images` float32 [N, C, H, W]; `scan_of_image` [N] says which scan each came from, `patient_of_image`
    [N] which patient, as far as the task can tell by the scans' names.

    `warned` is the share of scans that do not look like training, `statistics` what the guard may add to
    what it knows, `left_out` the number of slices beyond MOST_IMAGES.
    """

    images: Tensor
    scan_of_image: NDArray[np.int64]
    patient_of_image: NDArray[np.int64]
    warned: float
    statistics: ReferenceStatistics
    left_out: int


def cohort_files(attempt: Attempt) -> list[ScanFile]:
    """The scans of the job's cohort, by name.

    Raises:
        CohortUnknown, CohortGone: there is no such cohort, or not any more.
        AdaptationRefused: it is empty.
    """
    job = attempt.job
    assert job.hospital is not None
    assert job.cohort is not None
    with attempt.database.read() as session:
        cohorts.usable(session, job.hospital, job.cohort)
        rows = cohorts.scans(session, job.cohort)
    if not rows:
        raise AdaptationRefused(
            f"cohort {job.cohort} has no scan: upload some, then ask for the adaptation again"
        )
    return [cohorts.file_of(attempt.settings, row, row.name) for row in rows]


def load_images(
    files: Sequence[ScanFile],
    task: Task,
    reference: ReferenceStatistics | None,
    limits: Limits,
    tick: Tick,
) -> CohortImages:
    """Decode and prepare every scan.

    Raises:
        ScanError: a scan cannot be read or does not fit the task; the message names it.
        CohortGone: a file is not there.
    """
    budget = max(1, MOST_IMAGES // len(files))
    parts, summaries, total = [], [], 0
    for file in files:
        tick()
        try:
            slices, summary = prepare_scan(file.read(), task, limits)
        except ScanError as error:
            raise type(error)(f"scan '{file.name}': {error}") from error
        total += len(slices)
        parts.append(evenly(slices, budget))
        summaries.append(summary)
    images = torch.cat(parts)
    patients = numbered([file.name for file in files], task)
    return CohortImages(
        images=images,
        scan_of_image=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
        patient_of_image=np.repeat(patients, [len(part) for part in parts]),
        warned=float(np.mean([bool(check(summary, reference, task)) for summary in summaries])),
        statistics=merged(summaries),
        left_out=total - len(images),
    )


def prepare_scan(data: bytes, task: Task, limits: Limits) -> tuple[Tensor, ScanSummary]:
    """The network's input [S, C, H, W] of a scan's file, and what the guard sees in it. Raises ScanError."""
    scan = decode(data, limits)
    prepared = prepare(scan, task)
    # A copy: slices with neighbours share memory, which torch must not be given.
    return torch.from_numpy(prepared.slices.copy()), summarise(scan, prepared)


def evenly(slices: Tensor, most: int = MOST_IMAGES) -> Tensor:
    """At most so many of the slices, evenly spaced."""
    if len(slices) <= most:
        return slices
    return slices[((torch.arange(most) + 0.5) * len(slices) / most).long()]


def merged(summaries: Iterable[ScanSummary]) -> ReferenceStatistics:
    """What the guard may know of all of them."""
    return reduce(ReferenceStatistics.merge, map(ReferenceStatistics.of, summaries))
