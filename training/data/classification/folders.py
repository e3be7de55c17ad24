"""Load a classification federation from folders: one folder per site, and in it one per class.

root/
  task.yaml (optional)      kind: classification, with class_names
  SITE/
    CLASS/                  scans: files, or folders of a series; a class without images may be left out
    cases.csv (optional)    columns: file (as CLASS/NAME), and any of patient, split
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from model_store.errors import LocumStoreError, TaskError
from model_store.preprocessing import geometry_of
from model_store.preprocessing.intensity import match_channels
from model_store.scan import decode
from model_store.task import LEAST_SIDE, Task
from training.data.cases import (
    Federation,
    LabelledCase,
    Layout,
    Site,
    digest_of_cases,
    digest_of_sites,
    untrainable,
)
from training.data.scan_files import broken_links, content_digest, read_content, read_scan, scans_in, stem_of
from training.data.segmentation.layout import (
    CASES,
    IMAGES,
    Row,
    find_sites,
    is_visible,
    note_broken,
    parts_of,
    read_rows,
    whole_patients,
)
from training.errors import FederationError

# Largest inferred side, in pixels: a laptop trains this in reasonable time.
_LARGEST_SIDE = 224


def holds_classes(root: Path) -> bool:
    """Whether a folder without task.yaml is for classification: sites with folders, none for images."""
    if not root.is_dir() or parts_of(root, IMAGES):
        return False
    sites = _folders(root)
    return any(_folders(site) for site in sites) and not any(parts_of(site, IMAGES) for site in sites)


def load_folders(root: Path, task: Task | None, by_value: bool = False) -> Federation[LabelledCase]:  # noqa: ARG001
    """Read and check a federation of folders by class. Without `task`, the task is inferred.

    Raises FederationError; its `.problems` lists all problems, each with its file.
    """
    problems: list[str] = []
    folders = find_sites(root, problems)
    inferred = task is None
    if task is None:
        try:
            task = _inferred(root, folders)
        except ValueError as error:
            problems.append(f"{root}: no task.yaml, and none can be inferred: {error}")
    if task is None:
        raise untrainable(root, problems)
    sites = tuple(_read_site(folder, task, problems) for folder in folders)
    sites = tuple(_checked(site, task, problems) for site in sites)
    if problems:
        raise untrainable(root, problems)
    return Federation(root, task, sites, inferred, digest_of_sites(task, sites))


def load_classes(folder: Path, task: Task) -> Site[LabelledCase]:
    """Read and check the folder of one site, with a folder per class. Raises FederationError."""
    problems: list[str] = []
    site = _checked(_read_site(folder, task, problems), task, problems)
    if problems:
        raise FederationError(f"{folder} cannot be trained on:", problems)
    return site


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and is_visible(p.name))


def _read_site(folder: Path, task: Task, problems: list[str]) -> Site[LabelledCase]:
    """Read the site in `folder`, its cases ordered by class and file name."""
    site = folder.name
    known = {name: index for index, name in enumerate(task.class_names)}
    problems += [
        f"{site}/{found.name}: not a class of task '{task.name}' ({', '.join(known)}); rename or move it"
        for found in _folders(folder)
        if found.name not in known
    ]
    files = {
        f"{name}/{file}": (index, path)
        for name, index in known.items()
        for file, path in sorted(scans_in(folder / name).items())
    }
    for name in known:
        note_broken(f"{site}/{name}", broken_links(folder / name), problems)
    if not files:
        problems.append(f"site '{site}': empty; expected images in a folder per class ({', '.join(known)})")
    rows = read_rows(folder / CASES, site, problems)
    problems += [
        f"{site}/{CASES}: '{name}' is not a file of the site" for name in sorted(rows.keys() - files.keys())
    ]
    cases = []
    for name, (label, path) in files.items():
        row = rows.get(name, Row(None, None))
        patient = row.patient
        if patient is None:
            try:
                patient = (
                    task.patient_of(stem_of(path)) if task.patient else f"{path.parent.name}/{path.name}"
                )
            except TaskError as error:
                problems.append(f"{site}/{name}: {error}")
                continue
        cases.append(LabelledCase(name, path, label, patient, row.split))
    return Site(site, whole_patients(site, cases, problems))


def _checked(site: Site[LabelledCase], task: Task, problems: list[str]) -> Site[LabelledCase]:
    """Decode every file of a site, in threads, check it against the task, and set the site's digest."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        looks = list(pool.map(lambda case: _look(site.name, case, task), site.cases))
    problems += [problem for _, found in looks for problem in found]
    rows = (
        (case.name, case.patient, case.split or "", digest)
        for case, (digest, _) in zip(site.cases, looks, strict=True)
    )
    return replace(site, digest=digest_of_cases(rows))


def _look(site: str, case: LabelledCase, task: Task) -> tuple[str, tuple[str, ...]]:
    """Return the sha256 of a case's file, and its problems."""
    content = read_content(case.image)
    problems: tuple[str, ...] = ()
    try:
        scan = decode(content)
        match_channels(scan, task)
        geometry_of(scan, task)
    except LocumStoreError as error:
        problems = (f"{site}/{case.name}: {error}",)
    return content_digest(content), problems


def _inferred(root: Path, folders: Sequence[Path]) -> Task:
    """Infer the task: classes from the folders' names, channels and size from the images.

    Raises ValueError.
    """
    names = sorted({found.name for folder in folders for found in _folders(folder)})
    channels: set[int] = set()
    sides: list[tuple[int, int]] = []
    # Used only to find the slices; the size of the inferred task is not yet known.
    axial = Task(name="any", labels={"any": (1,)}, size=(16, 16))
    for path in (path for folder in folders for name in names for path in scans_in(folder / name).values()):
        try:
            scan = read_scan(path)
            _, rows, columns = geometry_of(scan, axial).slices
        except LocumStoreError:
            continue  # reported when every file is checked
        channels.add(scan.channels)
        sides.append((rows, columns))
    height, width = np.median(np.array(sides or [(LEAST_SIDE, LEAST_SIDE)]), axis=0)
    return Task(
        name=re.sub(r"[^a-z0-9_-]+", "-", root.resolve().name.lower()).strip("-_")[:64] or "federation",
        kind="classification",
        class_names=tuple(names),
        channels=1 if channels == {1} else 3,
        colour="refuse" if len(channels) <= 1 else "replicate",
        size=(min(round(height), _LARGEST_SIDE), min(round(width), _LARGEST_SIDE)),
    )


def inferred_in_words(task: Task) -> str:
    """Say what the classes of an inferred task came from."""
    return f"the folders' names are the classes: {', '.join(task.class_names)}"


CLASSES = Layout(holds_classes, load_folders, load_classes, inferred_in_words)
