"""One look at every file of a federation: does it decode, do mask and image agree, do they fit the task?"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model_store.errors import ScanError
from model_store.scan import Scan, decode
from model_store.task import Task
from training.data.cases import Case, Site

# Headers keep affines in 32 bits, and programs round them on the way: 0.01 mm is far below any voxel.
_AFFINE_TOLERANCE_MM = 1e-2


@dataclass(frozen=True)
class Look:
    """What was seen of one case. `values` are the mask's, and empty if it is no label map."""

    site: str
    case: Case
    problems: tuple[str, ...]
    digest: str = ""
    shape: tuple[int, ...] = ()
    affine: tuple[tuple[float, ...], ...] | None = None
    channels: int = 0
    values: tuple[int, ...] = ()


def look_at(sites: Iterable[Site]) -> list[Look]:
    """Decode every file once, in threads, and keep only what the checks need."""
    pairs = [(site.name, case) for site in sites for case in site.cases]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda pair: _look(*pair), pairs))


def fits_task(look: Look, task: Task) -> list[str]:
    """What keeps a case, sound in itself, from being one of the task."""
    problems = []
    name = look.case.name
    converts = {"luminance": (3, 1), "replicate": (1, 3)}.get(task.colour) == (look.channels, task.channels)
    if look.channels != task.channels and not converts:
        problems.append(
            f"{look.site}/images/{name}: {look.channels} channels; task '{task.name}' expects "
            f"{task.channels} (colour: {task.colour})"
        )
    known = {value for task_class in task.classes for value in task_class.values}
    outside = sorted(set(look.values) - known)
    if outside:
        problems.append(
            f"{look.site}/{look.case.mask.parent.name}/{name}: mask values {_few(outside)} are not in task "
            f"'{task.name}', which has {_few(sorted(known))}; correct the mask, or add them to a label or to "
            "background in task.yaml"
        )
    return problems


def _look(site: str, case: Case) -> Look:
    image_name = f"{site}/images/{case.name}"
    mask_name = f"{site}/{case.mask.parent.name}/{case.name}"
    problems: list[str] = []
    hasher = hashlib.sha256()
    image = _decode(case.image, image_name, hasher.update, problems)
    mask = _decode(case.mask, mask_name, hasher.update, problems)
    values: tuple[int, ...] = ()
    if mask is not None:
        values = _values(mask, mask_name, problems)
    if image is None or mask is None:
        return Look(site, case, tuple(problems))
    shape = image.voxels.shape[:-1]
    if mask.voxels.shape[:-1] != shape:
        problems.append(f"{mask_name}: shape {_by(mask.voxels.shape[:-1])}, but its image has {_by(shape)}")
    elif (
        image.affine is not None
        and mask.affine is not None
        and not np.allclose(image.affine, mask.affine, rtol=0, atol=_AFFINE_TOLERANCE_MM)
    ):
        problems.append(
            f"{mask_name}: its affine differs from its image's by up to "
            f"{np.abs(image.affine - mask.affine).max():.3g} mm; resample the mask onto the image's grid"
        )
    affine = None if image.affine is None else tuple(tuple(map(float, row)) for row in image.affine)
    return Look(site, case, tuple(problems), hasher.hexdigest(), shape, affine, image.channels, values)


def _decode(path: Path, name: str, update: Callable[[bytes], None], problems: list[str]) -> Scan | None:
    data = path.read_bytes()
    update(hashlib.sha256(data).digest())
    try:
        return decode(data)
    except ScanError as error:
        problems.append(f"{name}: {error}")
        return None


def _values(mask: Scan, name: str, problems: list[str]) -> tuple[int, ...]:
    """The values of a label map: one channel of whole numbers."""
    if mask.channels != 1:
        problems.append(f"{name}: a mask has one channel of label values, found {mask.channels} channels")
        return ()
    values = np.unique(mask.voxels)
    odd = values[values != np.round(values)]
    if odd.size:
        problems.append(f"{name}: mask values {_few(odd.tolist())} are not whole numbers")
        return ()
    return tuple(int(v) for v in values)


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _few(values: Sequence[float], limit: int = 8) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:limit])
    return f"{shown}, … ({len(values)} in all)" if len(values) > limit else shown
