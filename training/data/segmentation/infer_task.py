"""Infer the segmentation task of a federation without task.yaml from its data."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from model_store.errors import LocumStoreError, TaskError
from model_store.preprocessing import geometry_of
from model_store.task import SIZE_MULTIPLE, Task
from training.data.cases import Site
from training.data.scan_files import read_mask, read_scan

# Largest inferred side, in pixels: a laptop trains this in reasonable time.
_LARGEST_SIDE = 256
_MAX_VALUE = 65535
# A mask of volumes with more values than this has soft edges, and no label per value.
_MOST_LABELS = 32


def infer_task(root: Path, sites: Iterable[Site], *, by_value: bool = False) -> Task:
    """Infer a task with one binary label of all non-zero values, and channels and size from the images.

    With `by_value`, each value of the masks of volumes is a label of its own, if there are several, but no
    more than a person would draw. Every file is a patient of its own. Files that cannot be decoded are
    skipped; `look_at` reports them.
    Raises TaskError if no mask has a non-zero value.
    """
    values: set[int] = set()
    channels: set[int] = set()
    sides: list[tuple[int, int]] = []
    volumes = True
    # Used only to find the slices; the size of the inferred task is not yet known.
    axial = Task(name="any", labels={"foreground": (1,)}, size=(SIZE_MULTIPLE, SIZE_MULTIPLE))
    for case in (case for site in sites for case in site.cases):
        try:
            image, mask = read_scan(case.image), read_mask(case.mask)
            _, rows, columns = geometry_of(image, axial).slices
        except LocumStoreError:
            continue
        found = np.unique(mask.voxels)
        values |= {int(v) for v in found if v == round(float(v)) and 0 < v <= _MAX_VALUE}
        volumes = volumes and image.is_volume
        channels.add(image.channels)
        sides.append((rows, columns))
    if not values:
        raise TaskError(
            f"{root}: no task.yaml, and none can be inferred: no mask has a non-zero value. "
            "Write a task.yaml, or give a task"
        )
    height, width = np.median(np.array(sides), axis=0)
    labels = {"foreground": tuple(sorted(values))}
    if by_value and volumes and 1 < len(values) <= _MOST_LABELS:
        labels = {f"label-{value}": (value,) for value in sorted(values)}
    return Task(
        name=re.sub(r"[^a-z0-9_-]+", "-", root.resolve().name.lower()).strip("-_")[:64] or "federation",
        labels=labels,
        channels=1 if channels == {1} else 3,
        colour="refuse" if len(channels) == 1 else "replicate",
        size=(_side(height), _side(width)),
    )


def _side(length: float) -> int:
    rounded = round(length / SIZE_MULTIPLE) * SIZE_MULTIPLE
    return min(max(rounded, SIZE_MULTIPLE), _LARGEST_SIDE)
