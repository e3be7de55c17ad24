"""Check every file of a federation: it decodes, mask and image agree, and both fit the task.

The checks are those of `model_store.preprocessing`, made in advance, so that a file that passes cannot fail
during training.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from model_store.errors import LocumStoreError
from model_store.preprocessing import (
    by_labels,
    geometry_of,
    prepare_mask,
    prepare_volume,
    prepare_volume_mask,
)
from model_store.preprocessing.intensity import match_channels
from model_store.scan import decode_mask, is_contours
from model_store.task import IGNORED, Task
from training.data.cases import Case, Site
from training.data.consistency import Seen
from training.data.scan_files import content_digest, joined, read_content, with_values

Made = TypeVar("Made")


@dataclass(frozen=True)
class Look:
    """The result of checking one case.

    `digest` is a sha256 over both files, `image` that of the image. `classes` are those that the mask has,
    as the network sees it, `notes` remarks on how it was read; `seen` is of the image.
    """

    site: str
    case: Case
    digest: str
    image: str
    problems: tuple[str, ...] = ()
    classes: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    seen: Seen | None = None


def look_at(sites: Iterable[Site], task: Task) -> list[Look]:
    """Decode every file, in threads, and check each case against the task."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        pairs = [(site.name, case) for site in sites for case in site.cases]
        return list(pool.map(lambda pair: _look(pair[0], pair[1], task), pairs))


def _look(site: str, case: Case, task: Task) -> Look:
    problems: list[str] = []
    classes: frozenset[int] = frozenset()
    image_name = f"{site}/{case.image.parent.name}/{case.name}"
    mask_name = f"{site}/{case.mask.parent.name}/{case.mask.name}"

    def attempt(name: str, step: Callable[[], Made]) -> Made | None:
        try:
            return step()
        except LocumStoreError as error:
            problems.append(f"{name}: {error}")
            return None

    *images, drawn = map(read_content, (*case.images, case.mask))
    digests = [content_digest(content) for content in (*images, drawn)]
    digest = hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()
    image = attempt(image_name, partial(joined, images, task))
    # Contours cannot be read on a scan that cannot.
    readable = image is not None or not is_contours(drawn)
    mask = attempt(mask_name, partial(decode_mask, drawn, scan=image)) if readable else None
    mask = None if mask is None else with_values(mask, case.values)
    matched = None if mask is None else attempt(mask_name, partial(by_labels, mask, task))
    mask, notes = matched or (None, ())
    prepared = None
    if image is not None and task.is_volume:
        volume = attempt(image_name, partial(prepare_volume, image, task))
        if mask is not None and volume is not None:
            prepared = attempt(mask_name, partial(prepare_volume_mask, mask, task, volume.grid))
    elif image is not None:
        attempt(image_name, partial(match_channels, image, task))
        geometry = attempt(image_name, partial(geometry_of, image, task))
        if mask is not None and geometry is not None:
            prepared = attempt(mask_name, partial(prepare_mask, mask, task, geometry))
    if prepared is not None:
        classes = frozenset({*np.unique(prepared).tolist()} - {IGNORED})
    said = tuple(f"{mask_name}: {note.text}" for note in notes)
    seen = None if image is None else Seen.of(image)
    return Look(site, case, digest, digests[0], tuple(problems), classes, said, seen)


def labelled(looks: Iterable[Look], task: Task) -> dict[str, dict[str, int]]:
    """By site, in how many masks each label is."""
    members = {label: {*task.label_classes(label)} for label in task.labels}
    found: dict[str, dict[str, int]] = {}
    for look in looks:
        own = found.setdefault(look.site, dict.fromkeys(members, 0))
        for label, classes in members.items():
            own[label] += not classes.isdisjoint(look.classes)
    return found
