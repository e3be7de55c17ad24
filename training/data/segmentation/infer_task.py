"""A task read off the data, for a federation without task.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from model_store.errors import LocumStoreError, TaskError
from model_store.preprocessing import geometry_of
from model_store.task import SIZE_MULTIPLE, Task
from training.data.cases import Site
from training.data.scan_files import read_scan

# Where nothing is said, a size that a laptop trains in reasonable time.
_LARGEST_SIDE = 256
_MAX_VALUE = 65535


def infer_task(root: Path, sites: Iterable[Site]) -> Task:
    """One binary label of all non-zero values; channels and size from the images; one file, one patient.

    Files that cannot be decoded are passed over: checking them is another's work. Raises TaskError if no mask
    has anything in it.
    """
    values: set[int] = set()
    channels: set[int] = set()
    sides: list[tuple[int, int]] = []
    # Only where its slices lie is asked of this one; the size it will have is not yet known.
    axial = Task(name="any", labels={"foreground": (1,)}, size=(SIZE_MULTIPLE, SIZE_MULTIPLE))
    for case in (case for site in sites for case in site.cases):
        try:
            image, mask = (read_scan(path) for path in (case.image, case.mask))
            _, rows, columns = geometry_of(image, axial).slices
        except LocumStoreError:
            continue
        found = np.unique(mask.voxels)
        values |= {int(v) for v in found if v == round(float(v)) and 0 < v <= _MAX_VALUE}
        channels.add(image.channels)
        sides.append((rows, columns))
    if not values:
        raise TaskError(
            f"{root}: no task.yaml, and none can be inferred: no mask has a non-zero value. "
            "Write a task.yaml, or give a task"
        )
    height, width = np.median(np.array(sides), axis=0)
    return Task(
        name=re.sub(r"[^a-z0-9_-]+", "-", root.resolve().name.lower()).strip("-_")[:64] or "federation",
        labels={"foreground": tuple(sorted(values))},
        channels=1 if channels == {1} else 3,
        colour="refuse" if len(channels) == 1 else "replicate",
        size=(_side(height), _side(width)),
    )


def _side(length: float) -> int:
    rounded = round(length / SIZE_MULTIPLE) * SIZE_MULTIPLE
    return min(max(rounded, SIZE_MULTIPLE), _LARGEST_SIDE)
