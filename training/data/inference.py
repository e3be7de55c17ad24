"""A task read off the data, for a federation without task.yaml."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from nibabel.orientations import io_orientation

from model_store.errors import TaskError
from model_store.task import SIZE_MULTIPLE, Task
from training.data.inspection import Look

# Where nothing is said, a size that a laptop trains in reasonable time.
_LARGEST_SIDE = 256
_MAX_VALUE = 65535


def infer_task(root: Path, looks: Sequence[Look]) -> Task:
    """One binary label of all non-zero values; channels and size from the images; one file, one patient.

    Raises TaskError if there is nothing to infer from: no sound case, or no mask with a non-zero value.
    """
    looks = [look for look in looks if look.shape]
    values = sorted({v for look in looks for v in look.values if 0 < v <= _MAX_VALUE})
    if not values:
        raise TaskError(
            f"{root}: no task.yaml, and none can be inferred: no mask has a non-zero value. "
            "Write a task.yaml, or give a task"
        )
    channels = {look.channels for look in looks}
    heights, widths = zip(*(_in_plane(look) for look in looks), strict=True)
    return Task(
        name=re.sub(r"[^a-z0-9_-]+", "-", root.resolve().name.lower()).strip("-_")[:64] or "federation",
        labels={"foreground": tuple(values)},
        channels=1 if channels == {1} else 3,
        colour="refuse" if len(channels) == 1 else "replicate",
        size=(_side(heights), _side(widths)),
    )


def _in_plane(look: Look) -> tuple[int, int]:
    """Rows and columns of an image, or of a volume's axial slices."""
    axes = [0, 1]
    if look.affine is not None:
        world = io_orientation(np.array(look.affine))[:, 0]
        axes = [axis for axis in range(3) if world[axis] != 2]
    first, second = (look.shape[axis] for axis in axes)
    return first, second


def _side(lengths: Sequence[int]) -> int:
    rounded = round(float(np.median(lengths)) / SIZE_MULTIPLE) * SIZE_MULTIPLE
    return int(min(max(rounded, SIZE_MULTIPLE), _LARGEST_SIDE))
