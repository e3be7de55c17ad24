"""The scans of a cohort with the masks that were drawn on some of them, as a network is trained on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_store.errors import LocumStoreError
from model_store.guard import ReferenceStatistics, summarise
from model_store.preprocessing import prepare, prepare_mask
from model_store.scan import Limits, decode
from model_store.task import Task
from personalization.joining import Examples
from personalization.tick import Tick
from service.adaptation.attempt import Attempt
from service.adaptation.cohort import MOST_IMAGES, evenly, merged
from service.jobs import cohorts, masks
from service.jobs.cohort_files import ScanFile
from service.patients import PatientSplit, other_values, shows_target


@dataclass(frozen=True)
class LabelledImages:
    """`images` float32 [N, C, H, W]; `targets` uint8 [N, H, W], 0 where nobody drew.

    `names` has the scan of each slice, `drawn_on` whether it has a mask; `statistics` what the guard may add
    to what it knows, `left_out` the number of slices beyond MOST_IMAGES.
    """

    images: Tensor
    targets: Tensor
    names: tuple[str, ...]
    drawn_on: NDArray[np.bool_]
    statistics: ReferenceStatistics
    left_out: int

    @property
    def scan_of_image(self) -> NDArray[np.int64]:
        """Which slices are of one scan [N]."""
        return np.unique(self.names, return_inverse=True)[1].astype(np.int64)

    @property
    def drawn(self) -> dict[str, bool]:
        """The scans with masks, and whether a slice of theirs still shows a target."""
        shows = self.targets.flatten(1).any(dim=1).tolist()
        found: dict[str, bool] = {}
        for name, drawn_on, there in zip(self.names, self.drawn_on, shows, strict=True):
            if drawn_on:
                found[name] = found.get(name, False) or there
        return found

    def examples(self, scans: Sequence[str], split: PatientSplit) -> Examples:
        """Every slice of these scans."""
        wanted = set(scans)
        chosen = [index for index, name in enumerate(self.names) if name in wanted]
        patients = tuple(split.patients[self.names[index]] for index in chosen)
        return Examples(self.images[chosen], self.targets[chosen], patients)


def masks_of(attempt: Attempt, task: Task) -> tuple[dict[str, ScanFile], frozenset[str]]:
    """The masks of the job's cohort by their scans' names, and which scans' show a target.

    Warns of those that look like class indices.
    """
    assert attempt.job.cohort is not None
    with attempt.database.read() as session:
        rows = masks.of_cohort(session, attempt.job.cohort)
    files = {name: cohorts.file_of(attempt.settings, row, name) for name, row in rows.items()}
    if hint := other_values({name: row.label_values for name, row in rows.items()}, task):
        attempt.warn(hint)
    return files, frozenset(name for name, row in rows.items() if shows_target(row.label_values, task))


def load_labelled(
    scans: Sequence[ScanFile],
    drawn: Mapping[str, ScanFile],
    task: Task,
    limits: Limits,
    tick: Tick,
) -> LabelledImages:
    """Decode and prepare every scan, and its mask if it has one.

    Of more than MOST_IMAGES slices, those of scans with masks are kept first: only they are learned from.

    Raises:
        ScanError, TaskError: a file cannot be read or does not fit; the message names it.
        CohortGone: a file is not there.
    """
    images, targets, names, drawn_on, statistics, left_out = [], [], [], [], [], 0
    room = MOST_IMAGES
    for file, after in _drawn_first(scans, drawn):
        tick()
        try:
            scan = decode(file.read(), limits)
            prepared = prepare(scan, task)
            mask = drawn.get(file.name)
            target = np.zeros((len(prepared.slices), *task.size), np.uint8)
            if mask is not None:
                target = prepare_mask(decode(mask.read(), limits), task, prepared.geometry)
        except LocumStoreError as error:
            raise type(error)(f"scan '{file.name}': {error}") from error
        # An equal part of what those before it left.
        budget = max(1, room // after)
        # Copies: slices with neighbours share memory, which torch must not be given.
        kept = evenly(torch.from_numpy(prepared.slices.copy()), budget)
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
    """Those with masks, then the others; with each how many of its kind are left, itself included."""
    for kind in (True, False):
        files = [file for file in scans if (file.name in drawn) is kind]
        yield from zip(files, range(len(files), 0, -1), strict=True)
