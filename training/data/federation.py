"""Load a federation from a folder or an .npz, and report all problems of the data in one error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from model_store.errors import TaskError
from model_store.task import Task, TaskKind
from training.data.cases import Case, Federation, Layout, Site, untrainable
from training.data.classification import CLASSES, Partition, load_npz
from training.data.segmentation.folders import MASKS
from training.data.segmentation.infer_task import task_of_dataset_json
from training.errors import FederationError

__all__ = ["TASK_FILE", "Case", "Federation", "Site", "layout_of", "load_federation", "load_site"]

TASK_FILE = "task.yaml"

# Without task.yaml, the first that a folder holds.
_LAYOUTS: Mapping[TaskKind, Layout] = {"classification": CLASSES, "segmentation": MASKS}


def layout_of(task: Task) -> Layout:
    """How the files of a task are laid out."""
    return _LAYOUTS[task.kind]


def load_federation(
    root: Path, task: Task | None = None, partition: Partition | None = None, *, by_value: bool = False
) -> Federation[Any]:
    """Read and check the federation folder `root`.

    For the layout see `training.data.segmentation.layout` and `training.data.classification`. `root` may also
    be an .npz for classification, which `partition` divides among clients.

    The task is `task` if given, otherwise `root/task.yaml`, otherwise inferred (`Federation.inferred`;
    `by_value` as `infer_task` takes it: for a plan, for which a dataset.json of nnU-Net or the Decathlon
    counts too, and a task need not say a size).
    Raises FederationError; its `.problems` lists all problems, each with its file.
    """
    if root.is_file():
        return load_npz(root, task, partition or Partition())
    if partition is not None:
        raise untrainable(root, ["clients and their shares are for an .npz; the sites of a folder are given"])
    if task is None and (root / TASK_FILE).is_file():
        try:
            task = Task.load(root / TASK_FILE, for_plan=by_value)
        except TaskError as error:
            raise untrainable(root, [str(error)]) from error
    inferred = task is None
    if task is None and by_value:
        try:
            task = task_of_dataset_json(root)
        except TaskError as error:
            raise untrainable(root, [str(error)]) from error
    layout = layout_of(task) if task else next(each for each in _LAYOUTS.values() if each.holds(root))
    return replace(layout.read(root, task, by_value), inferred=inferred)


def load_site(folder: Path, task: Task, name: str) -> Site[Any]:
    """Read and check one hospital's own folder, laid out as a site of a federation.

    The site is called `name`, whatever the folder is called. Raises FederationError; its `.problems` lists
    all problems, each with its file.
    """
    if not folder.is_dir():
        raise FederationError(f"{folder} cannot be trained on:", ["expected a folder, found none"])
    return replace(layout_of(task).read_site(folder, task), name=name)
