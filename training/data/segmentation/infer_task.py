"""Infer the segmentation task of a federation without task.yaml from its data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from model_store.errors import LocumStoreError, TaskError
from model_store.preprocessing import geometry_of
from model_store.task import SIZE_MULTIPLE, Task
from training.data.cases import Site
from training.data.scan_files import read_mask, read_scan
from training.data.segmentation.sidecar import (
    BACKGROUND,
    FILE,
    IGNORE,
    channels_in,
    content_of,
    labels_in,
)

# Largest inferred side, in pixels: a laptop trains this in reasonable time.
_LARGEST_SIDE = 256
_MAX_VALUE = 65535
# A mask with more values than this has soft edges, and no label per value.
_MOST_LABELS = 32


def infer_task(root: Path, sites: Iterable[Site], *, by_value: bool = False) -> Task:
    """Infer a task from the masks' values, and channels and size from the images.

    Where the masks of every site have the same values, but no more than a person would draw, each value is a
    label of its own. Otherwise values are written in different ways (1 here, 255 there), or masks have soft
    edges, and all values other than zero are one label. With `by_value`, values of volumes are labels of
    their own also where a site lacks some. Every file is a patient of its own. Files that cannot be decoded
    are skipped; `look_at` reports them.
    Raises TaskError if no mask has a non-zero value.
    """
    by_site: dict[str, set[int]] = {}
    channels: set[int] = set()
    sides: list[tuple[int, int]] = []
    volumes = True
    # Used only to find the slices; the size of the inferred task is not yet known.
    axial = Task(name="any", labels={"foreground": (1,)}, size=(SIZE_MULTIPLE, SIZE_MULTIPLE))
    for site, case in ((each.name, case) for each in sites for case in each.cases):
        try:
            image, mask = read_scan(case.image), read_mask(case.mask)
            _, rows, columns = geometry_of(image, axial).slices
        except LocumStoreError:
            continue
        found = np.unique(mask.voxels)
        by_site.setdefault(site, set()).update(
            int(v) for v in found if v == round(float(v)) and 0 < v <= _MAX_VALUE
        )
        volumes = volumes and image.is_volume
        channels.add(image.channels)
        sides.append((rows, columns))
    values: set[int] = set().union(*by_site.values())
    if not values:
        raise TaskError(
            f"{root}: no task.yaml, and none can be inferred: no mask has a non-zero value. "
            "Write a task.yaml, or give a task"
        )
    height, width = np.median(np.array(sides), axis=0)
    labels = {"foreground": tuple(sorted(values))}
    alike = all(found == values for found in by_site.values() if found)
    if (alike or (by_value and volumes)) and 1 < len(values) <= _MOST_LABELS:
        labels = {f"label-{value}": (value,) for value in sorted(values)}
    return Task(
        name=_name_of(root),
        labels=labels,
        channels=1 if channels == {1} else 3,
        colour="refuse" if len(channels) == 1 else "replicate",
        size=(_side(height), _side(width)),
    )


def with_labels(task: Task, labels: Mapping[str, tuple[int, ...]]) -> Task:
    """An inferred task with the labels that the sites' dataset.json name. Raises TaskError."""
    named = dict(labels)
    background, ignored = named.pop(BACKGROUND, (0,)), named.pop(IGNORE, ())
    said = {"labels": named, "background": background, "ignore": ignored}
    try:
        return Task.model_validate({**task.model_dump(), **said})
    except ValidationError as error:
        raise TaskError(f"{FILE} of the sites: {error.errors()[0]['msg']}; write a task.yaml") from error


def inferred_in_words(task: Task) -> str:
    """Say what the labels, channels and size of an inferred task came from."""
    named = [f"{name} is {_listed(values)}" for name, values in task.labels.items()]
    together = any(len(values) > 1 for values in task.labels.values())
    size = "x".join(map(str, task.size))
    return (
        f"of the masks' values, {', '.join(named)}"
        + ("; give them labels of their own where they are different things" if together else "")
        + f"; slices are trained on at {size}"
    )


def _listed(values: tuple[int, ...]) -> str:
    shown = [str(value) for value in values[:8]]
    more = f" and {len(values) - len(shown)} more" if len(values) > len(shown) else ""
    return ", ".join(shown) + more


def task_of_dataset_json(root: Path) -> Task | None:
    """Make a task of volumes from nnU-Net's or the Decathlon's dataset.json; None without such a file.

    It has the labels and the channels by name. The geometry is a placeholder, for a plan to replace. Raises
    TaskError for a file that is neither.
    """
    path = root / FILE
    if not path.is_file():
        return None
    try:
        content = content_of(path)
        labels, channels = labels_in(content), content.get("channel_names") or content["modality"]
        background, ignored = labels.pop(BACKGROUND, (0,)), labels.pop(IGNORE, ())
        names = channels_in(channels)
        ct = all(name.casefold() == "ct" for name in names)
        listed = [{"name": _plain(name) or f"channel-{i}"} for i, name in enumerate(names)]
        return Task.model_validate(
            {
                "name": _name_of(root),
                "labels": labels,
                "background": background,
                "ignore": ignored,
                "channels": 1 if len(names) == 1 else listed,
                "geometry": {"patch": (32, 32, 32)},
                "modality": "CT" if ct else None,
            }
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(
            f"{path}: expected labels and channel_names (nnU-Net), or labels and modality (Decathlon), by "
            f"name and number; {type(error).__name__}: {error}. Write a task.yaml in its place"
        ) from error


def _name_of(root: Path) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", root.resolve().name.lower()).strip("-_")[:64] or "federation"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-")[:32]


def _side(length: float) -> int:
    rounded = math.ceil(length / SIZE_MULTIPLE) * SIZE_MULTIPLE  # up: the network sees all that is there
    return min(max(rounded, SIZE_MULTIPLE), _LARGEST_SIDE)
