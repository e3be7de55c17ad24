"""Load a federation from a folder or an .npz, and report all problems of the data in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from model_store.errors import TaskError
from model_store.task import Task
from training.data.cases import Case, Federation, Site, digest_of_cases, digest_of_sites, untrainable
from training.data.classification import Partition, holds_classes, load_classes, load_folders, load_npz
from training.data.segmentation.infer_task import infer_task, task_of_dataset_json
from training.data.segmentation.inspection import Look, lacking, look_at
from training.data.segmentation.layout import find_sites, read_site
from training.errors import FederationError

__all__ = ["TASK_FILE", "Case", "Federation", "Site", "load_federation", "load_site"]

TASK_FILE = "task.yaml"


def load_federation(
    root: Path, task: Task | None = None, partition: Partition | None = None, *, by_value: bool = False
) -> Federation[Any]:
    """Read and check the federation folder `root`.

    For the layout see `training.data.segmentation.layout` and `training.data.classification`. `root` may also
    be an .npz for classification, which `partition` divides among clients.

    The task is `task` if given, otherwise `root/task.yaml`, otherwise inferred (`Federation.inferred`;
    `by_value` as `infer_task` takes it, and with it a dataset.json of nnU-Net or the Decathlon counts).
    Raises FederationError; its `.problems` lists all problems, each with its file.
    """
    if root.is_file():
        return load_npz(root, task, partition or Partition())
    problems: list[str] = []
    if partition is not None:
        raise untrainable(root, ["clients and their shares are for an .npz; the sites of a folder are given"])
    if task is None and (root / TASK_FILE).is_file():
        try:
            task = Task.load(root / TASK_FILE)
        except TaskError as error:
            raise untrainable(root, [str(error)]) from error
    inferred = task is None
    if task is None and by_value:
        try:
            task = task_of_dataset_json(root)
        except TaskError as error:
            raise untrainable(root, [str(error)]) from error
    if task.kind == "classification" if task else holds_classes(root):
        return load_folders(root, task)
    sites = [read_site(folder, task, problems) for folder in find_sites(root, problems)]
    if task is None:
        try:
            task = infer_task(root, sites, by_value=by_value)
        except TaskError as error:
            raise untrainable(root, [*problems, str(error)]) from error
    looks = look_at(sites, task)
    problems += [problem for look in looks for problem in look.problems]
    if problems:
        raise untrainable(root, problems)
    missing = lacking(looks, task)
    if all(len(lack) == len(sites) for lack in missing.values()):
        values = ", ".join(f"{name} ({', '.join(map(str, used))})" for name, used in task.labels.items())
        raise untrainable(
            root,
            [
                f"no mask of any site has a pixel of {values}: there is nothing to learn; correct the masks, "
                "or the values in task.yaml"
            ],
        )
    sites = [_described(site, looks, missing) for site in sites]
    unlabelled = tuple(label for label, lack in missing.items() if len(lack) == len(sites))
    digest = digest_of_sites(task, sites)
    return Federation(root, task, tuple(sites), inferred, digest, _repeated(looks), unlabelled)


def load_site(folder: Path, task: Task, name: str) -> Site[Any]:
    """Read and check one hospital's own folder, laid out as a site of a federation.

    The site is called `name`, whatever the folder is called. Raises FederationError; its `.problems` lists
    all problems, each with its file.
    """
    if not folder.is_dir():
        raise FederationError(f"{folder} cannot be trained on:", ["expected a folder, found none"])
    if task.kind == "classification":
        return replace(load_classes(folder, task), name=name)
    problems: list[str] = []
    site = read_site(folder, task, problems)
    looks = look_at([site], task)
    problems += [problem for look in looks for problem in look.problems]
    if problems:
        raise FederationError(f"{folder} cannot be trained on:", problems)
    return replace(_described(site, looks, lacking(looks, task)), name=name)


def _described(site: Site, looks: Sequence[Look], missing: Mapping[str, Sequence[str]]) -> Site:
    rows = (
        (look.case.name, look.case.patient, look.case.split or "", look.digest)
        for look in looks
        if look.site == site.name
    )
    empty = all(site.name in lack for lack in missing.values())
    return replace(site, digest=digest_of_cases(rows), empty=empty)


def _repeated(looks: Sequence[Look]) -> tuple[tuple[str, ...], ...]:
    """Find identical images of different patients: a split by patient may put them on both sides."""
    same: dict[str, list[Look]] = {}
    for look in looks:
        same.setdefault(look.image, []).append(look)
    return tuple(
        tuple(f"{look.site}/{look.case.image.parent.name}/{look.case.name}" for look in group)
        for group in same.values()
        if len({(look.site, look.case.patient) for look in group}) > 1
    )
