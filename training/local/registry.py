"""The kinds of task: one class of `Data` each, by what a manifest says of the task."""

from __future__ import annotations

from model_store.task import Task, TaskKind
from training.local.data import Data
from training.local.images import Images
from training.local.slices import Slices
from training.local.volumes import Volumes

# Kind and spatial dimensions of the task: the class of its data.
_KINDS: dict[tuple[TaskKind, int], type[Data]] = {
    ("segmentation", 2): Slices,
    ("segmentation", 3): Volumes,
    ("classification", 2): Images,
}


def kind_of(task: Task) -> type[Data]:
    """The class that loads, batches, answers and scores the data of a task."""
    return _KINDS[task.kind, task.spatial_dims]
