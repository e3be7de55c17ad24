"""Read the folders of a segmentation federation: pair images with masks, and find patients and splits.

root/                        or   root/
  task.yaml (optional)              images/  masks/     (one site, named after the folder)
  SITE/
    images/  masks/               `labels/` is read as `masks/`
    cases.csv (optional)          columns: file, and any of patient, split
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from model_store.errors import TaskError
from model_store.task import Task
from training.data.cases import SPLITS, AnyCase, Case, Site, Split
from training.data.scan_files import scans_in, stem_of

IMAGES = "images"
# The Medical Segmentation Decathlon and many others call masks labels.
MASKS = ("masks", "labels")
CASES = "cases.csv"

# A site's name is used as a folder, in URLs and in the lineage of artefacts.
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Used in place of a site's name in artefacts: the global model, a scan's own tokens, models of clusters, and
# models of hospitals outside the federation.
_RESERVED = re.compile(r"global|own|(cluster|at)-.*")


@dataclass(frozen=True)
class Row:
    """One line of cases.csv; an empty field is None."""

    patient: str | None
    split: Split | None


def find_sites(root: Path, problems: list[str]) -> list[Path]:
    """Find the sites' folders, sorted by name. Problems are appended to `problems`."""
    if not root.is_dir():
        problems.append(f"{root}: expected a folder with one folder per site, found none")
        return []
    if (root / IMAGES).is_dir():
        folders = [root.resolve()]
    else:
        folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith((".", "_")))
        if not folders:
            problems.append(
                f"{root}: no site; expected a folder per site with {IMAGES}/ and {MASKS[0]}/ in it"
            )
    for folder in folders:
        check_name(folder.name, problems)
    return folders


def check_name(site: str, problems: list[str]) -> None:
    """Check a site's name, which is that of its folder. Problems are appended to `problems`."""
    if not _SAFE_NAME.fullmatch(site):
        problems.append(
            f"site {site!r}: a site's name becomes part of paths; rename the folder to at most 64 "
            "letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    elif _RESERVED.fullmatch(site):
        problems.append(f"site {site!r}: the name is reserved; rename the folder")


def read_site(folder: Path, task: Task | None, problems: list[str]) -> Site:
    """Read the site in `folder`, its cases ordered by file name. Problems are appended to `problems`.

    The patient comes from cases.csv, otherwise from the task's `patient` expression, otherwise from the
    file's name.
    """
    site = folder.name
    images = scans_in(folder / IMAGES)
    masks_folder = next((folder / name for name in MASKS if (folder / name).is_dir()), folder / MASKS[0])
    masks = _masks_of(images, scans_in(masks_folder))
    if not images and not masks:
        problems.append(f"site '{site}': empty; expected images in {IMAGES}/ and their masks in {MASKS[0]}/")
    problems += [
        f"{site}/{IMAGES}/{name}: no mask; expected {site}/{masks_folder.name}/{name}"
        for name in sorted(images.keys() - masks.keys())
    ]
    problems += [
        f"{site}/{masks_folder.name}/{name}: no image; expected {site}/{IMAGES}/{name}"
        for name in sorted(masks.keys() - images.keys())
    ]
    rows = read_rows(folder / CASES, site, problems)
    problems += [
        f"{site}/{CASES}: '{name}' is not a file of {IMAGES}/" for name in sorted(rows.keys() - images.keys())
    ]
    cases = []
    for name in sorted(images.keys() & masks.keys()):
        row = rows.get(name, Row(None, None))
        patient = row.patient
        if patient is None:
            try:
                stem = stem_of(images[name])
                patient = task.patient_of(stem) if task else stem
            except TaskError as error:
                problems.append(f"{site}/{IMAGES}/{name}: {error}")
                continue
        cases.append(Case(images[name], masks[name], patient, row.split))
    return Site(site, whole_patients(site, cases, problems))


def _masks_of(images: Mapping[str, Path], masks: Mapping[str, Path]) -> dict[str, Path]:
    """Map image names to masks: a mask has its image's name.

    The mask of a folder, a .zip or a .dcm may have another suffix: NAME.nii.gz, or NAME.dcm.
    """
    series = [
        name
        for name, path in images.items()
        if name not in masks and (path.is_dir() or path.suffix.lower() in (".zip", ".dcm"))
    ]
    own = _by_stem({name: images[name] for name in series})
    other = _by_stem({name: path for name, path in masks.items() if name not in images})
    renamed = {other[stem]: own[stem] for stem in own.keys() & other.keys()}
    return {renamed.get(name, name): path for name, path in masks.items()}


def _by_stem(paths: Mapping[str, Path]) -> dict[str, str]:
    """Map stems to names, without the stems of several."""
    stems: dict[str, list[str]] = {}
    for name, path in paths.items():
        stems.setdefault(stem_of(path), []).append(name)
    return {stem: names[0] for stem, names in stems.items() if len(names) == 1}


def read_rows(path: Path, site: str, problems: list[str]) -> dict[str, Row]:
    """Read cases.csv by file name; empty without the file. Problems are appended to `problems`."""
    if not path.is_file():
        return {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, skipinitialspace=True)
            columns = reader.fieldnames or []
            lines = [(reader.line_num, line) for line in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        problems.append(f"{site}/{CASES}: cannot be read as CSV: {error}")
        return {}
    if "file" not in columns or not set(columns) <= {"file", "patient", "split"}:
        problems.append(
            f"{site}/{CASES}: expected the columns file, patient, split (the last two are optional), "
            f"found {', '.join(columns) or 'none'}"
        )
        return {}
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        problems.append(
            f"{site}/{CASES}: expected every column once, found {', '.join(twice)} more than once; "
            "keep one of each"
        )
        return {}
    rows: dict[str, Row] = {}
    for number, line in lines:
        # DictReader stores fields without a column under the key None.
        if any(field.strip() for field in line.get(None) or ()):
            problems.append(
                f"{site}/{CASES} line {number}: expected {len(columns)} fields, found more; "
                "quote a field that has a comma, or name the column"
            )
            continue
        name, patient, split = ((line.get(c) or "").strip() for c in ("file", "patient", "split"))
        if name in rows:
            problems.append(f"{site}/{CASES} line {number}: '{name}' is named twice")
        known = next((s for s in SPLITS if s == split), None)
        if split and known is None:
            problems.append(
                f"{site}/{CASES} line {number}: unknown split '{split}'; "
                f"expected {', '.join(SPLITS)} or nothing"
            )
        rows[name] = Row(patient or None, known)
    return rows


def whole_patients(site: str, cases: list[AnyCase], problems: list[str]) -> tuple[AnyCase, ...]:
    """Give all cases of a patient the split that any of them has. Two different splits are a problem."""
    declared: dict[str, set[Split]] = {}
    for case in cases:
        if case.split is not None:
            declared.setdefault(case.patient, set()).add(case.split)
    for patient, splits in sorted(declared.items()):
        if len(splits) > 1:
            problems.append(
                f"{site}/{CASES}: patient '{patient}' is in {' and '.join(sorted(splits))}; "
                "a patient belongs to one split"
            )
    return tuple(replace(case, split=next(iter(declared.get(case.patient, ())), None)) for case in cases)
