"""Read the folders of a segmentation federation: pair images with masks, and find patients and splits.

root/                        or   root/
  task.yaml (optional)              images/  masks/     (one site, named after the folder)
  SITE/
    images/  masks/               other common names of both are in `IMAGES` and `MASKS`
    cases.csv (optional)          columns: file, and any of patient, split
    dataset.json (optional)       nnU-Net's or the Decathlon's: what the masks' values mean at this site

With several channels, a case has a file for each: NAME_CHANNEL or nnU-Net's NAME_0000, and the mask NAME.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from model_store.errors import TaskError
from model_store.scans.channels import group_cases
from model_store.task import Task
from training.data.cases import SPLITS, AnyCase, Case, Site, Split
from training.data.scan_files import broken_links, is_system_file, scans_in, stem_of, what_it_is
from training.data.segmentation.sidecar import FILE, Sidecar, compared, labels_of

# The folders' names, in any case. The Medical Segmentation Decathlon and nnU-Net have imagesTr and labelsTr.
IMAGES = ("images", "imagestr", "imgs")
MASKS = ("masks", "labels", "labelstr")
CASES = "cases.csv"
_FIRST = "_0000"

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


@dataclass(frozen=True)
class Unmasked:
    """A scan without its mask: the files of its channels, in the task's order, and its patient."""

    name: str
    images: tuple[Path, ...]
    patient: str


def find_sites(root: Path, problems: list[str]) -> list[Path]:
    """Find the sites' folders, sorted by name. Problems are appended to `problems`."""
    if not root.is_dir():
        problems.append(f"{root}: expected a folder with one folder per site, found none")
        return []
    if parts_of(root, IMAGES):
        folders = [root.resolve()]
    else:
        folders = sorted(p for p in root.iterdir() if p.is_dir() and is_visible(p.name))
        if not folders:
            problems.append(
                f"{root}: no site; expected a folder per site with {IMAGES[0]}/ and {MASKS[0]}/ in it"
            )
    for folder in folders:
        check_name(folder.name, problems)
    return folders


def is_visible(name: str) -> bool:
    """Whether a folder may be a site's, or a class's: neither hidden nor of an operating system."""
    return not name.startswith("_") and not is_system_file(name)


def parts_of(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the folders in `folder` that have one of these names, in any case."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and p.name.casefold() in names)


def _parts(folder: Path, problems: list[str]) -> tuple[Path, Path] | None:
    """Return a site's folders of images and masks. Missing ones, and several of a kind, are problems."""
    found = {names[0]: parts_of(folder, names) for names in (IMAGES, MASKS)}
    inside = sorted(p.name for p in folder.iterdir() if p.is_dir() and is_visible(p.name))
    problems += [
        f"site '{folder.name}': found the folders {', '.join(p.name for p in parts)} for {kind}; keep one"
        for kind, parts in found.items()
        if len(parts) > 1
    ]
    images, masks = (parts[0] if parts else None for parts in found.values())
    if not any(scans_in(part) or broken_links(part) for part in (images, masks)):
        problems.append(
            f"site '{folder.name}': empty; expected images in {IMAGES[0]}/ and their masks in {MASKS[0]}/, "
            f"found {', '.join(inside) or 'no folder'}"
        )
        return None
    problems += [
        f"site '{folder.name}': expected the folder {kind}/, found {', '.join(inside)}; rename the one with "
        f"the {kind} to {kind}"
        for kind, parts in found.items()
        if not parts
    ]
    return None if images is None or masks is None else (images, masks)


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
    parts = _parts(folder, problems)
    if parts is None:
        return Site(site, ())
    images_folder, masks_folder = parts
    images, others = _files_of(f"{site}/{images_folder.name}", scans_in(images_folder), task, problems)
    masks = _masks_of(images, scans_in(masks_folder))
    broken = broken_links(images_folder), broken_links(masks_folder)
    for part, links in zip((images_folder, masks_folder), broken, strict=True):
        note_broken(f"{site}/{part.name}", links, problems)
    gone = broken[0].keys() | broken[1].keys()
    for found, other, lacks, folders in (
        (images, masks, "no mask", (images_folder, masks_folder)),
        (masks, images, "no image", (masks_folder, images_folder)),
    ):
        here, there = (f"{site}/{folder.name}" for folder in folders)
        problems += [
            f"{here}/{name}: {lacks}; expected {there}/{name}"
            f"{_in_brackets(_mask_among(found[name], lacks, folders[1].name) or what_it_is(found[name]))}"
            for name in sorted(found.keys() - other.keys() - gone)
        ]
    sidecar = Sidecar()
    if task is not None and (labels := labels_of(folder, problems)) is not None:
        sidecar = compared(site, labels, task, problems)
    rows = read_rows(folder / CASES, site, problems)
    problems += [
        f"{site}/{CASES}: '{name}' is not a file of {images_folder.name}/"
        for name in sorted(rows.keys() - images.keys() - gone)
    ]
    cases = []
    for name in sorted(images.keys() & masks.keys()):
        row = rows.get(name, Row(None, None))
        try:
            patient = row.patient or _patient_of(name, None if others else images[name], task)
        except TaskError as error:
            problems.append(f"{site}/{images_folder.name}/{name}: {error}")
            continue
        own = images[name], masks[name], patient, row.split, others.get(name, ())
        cases.append(Case(*own, sidecar.values))
    notes = (sidecar.note,) if sidecar.note else ()
    return Site(site, whole_patients(site, cases, problems), undrawn=sidecar.undrawn, notes=notes)


def read_unmasked(folder: Path, task: Task, problems: list[str]) -> list[Unmasked]:
    """Read the scans of a folder, which has them itself or in images/ as a site, ordered by name.

    Masks are not looked at. The patient is found as by `read_site`. Problems are appended to `problems`.
    """
    if not folder.is_dir():
        problems.append(f"{folder}: expected a folder with scans, found none")
        return []
    parts = parts_of(folder, IMAGES)
    if len(parts) > 1:
        found = ", ".join(part.name for part in parts)
        problems.append(f"{folder}: found the folders {found} for images; keep one")
        return []
    place = parts[0] if parts else folder
    files = {name: path for name, path in scans_in(place).items() if parts or name not in (CASES, FILE)}
    note_broken(str(place), broken_links(place), problems)
    if not files:
        inside = sorted(p.name for p in place.iterdir() if p.is_dir() and is_visible(p.name))
        found = f"the folders {', '.join(inside)}: name each that has scans" if inside else "none"
        problems.append(f"{place}: expected scans, in it or in {IMAGES[0]}/ in it, found {found}")
        return []
    images, others = _files_of(str(place), files, task, problems)
    rows = read_rows(folder / CASES, str(folder), problems)
    problems += [
        f"{folder}/{CASES}: '{name}' is not a file of {place}" for name in sorted(rows.keys() - images.keys())
    ]
    scans = []
    for name in sorted(images):
        row = rows.get(name, Row(None, None))
        try:
            patient = row.patient or _patient_of(name, None if others else images[name], task)
        except TaskError as error:
            problems.append(f"{place}/{name}: {error}")
            continue
        scans.append(Unmasked(name, (images[name], *others.get(name, ())), patient))
    return scans


def _files_of(
    folder: str, files: Mapping[str, Path], task: Task | None, problems: list[str]
) -> tuple[Mapping[str, Path], Mapping[str, tuple[Path, ...]]]:
    """The first file of each case by name, and the further ones of those with a file per channel."""
    if task is None or not task.separate_channels:
        return files, {}
    return _by_channel(folder, files, task, problems)


def _patient_of(name: str, file: Path | None, task: Task | None) -> str:
    """The patient of a case's name; `file` where it has one file. Raises TaskError."""
    stem = stem_of(Path(name) if file is None else file)
    return task.patient_of(stem) if task else stem


def _mask_among(path: Path, lacks: str, masks: str) -> str | None:
    """Say that a file beside images without a mask is one of 3D Slicer's segmentations; None elsewhere."""
    if lacks != "no mask" or not path.name.lower().endswith(".seg.nrrd"):
        return None
    return f"a .seg.nrrd is a segmentation, and no scan: put it into {masks}/ under its scan's name"


def _in_brackets(what: str | None) -> str:
    return f" ({what})" if what else ""


def note_broken(folder: str, links: Mapping[str, str], problems: list[str]) -> None:
    """Append a problem for every link without a target; `folder` is what messages call its folder."""
    problems += [
        f"{folder}/{name}: a link to {target}, which does not exist here; copy the file, or mount where it is"
        for name, target in links.items()
    ]


def _by_channel(
    folder: str, files: Mapping[str, Path], task: Task, problems: list[str]
) -> tuple[dict[str, Path], dict[str, tuple[Path, ...]]]:
    """Group the files of each case: the file of its first channel, and those of the others, by case.

    NAME_CHANNEL.nii.gz is of a channel by the task's name of it, NAME_0000.nii.gz by its number
    (`model_store.scans.channels`). The case is called NAME.nii.gz. Cases without a channel, and files of
    none, are problems.
    """
    channels = [channel.name for channel in task.channel_list]
    wanted = (
        f"NAME_{channels[0]} or NAME{_FIRST}, with a channel of the task ({', '.join(channels)}) at its end"
    )
    names = {stem_of(path): name for name, path in files.items()}
    found, others = group_cases(names, channels)
    problems += [
        f"{folder}/{names[stem]}: of no channel, or a second file of one; expected a name such as {wanted}"
        for stem in others
    ]
    first: dict[str, Path] = {}
    further: dict[str, tuple[Path, ...]] = {}
    for case, parts in found.items():
        if lacking := [channel for number, channel in enumerate(channels) if number not in parts]:
            problems.append(
                f"{folder}: '{case}' has no file of {', '.join(lacking)}; expected one for each of "
                f"{', '.join(channels)}"
            )
            continue
        paths = [files[names[parts[number]]] for number in range(len(channels))]
        name = case + names[parts[0]][len(parts[0]) :]
        first[name], further[name] = paths[0], tuple(paths[1:])
    return first, further


def _masks_of(images: Mapping[str, Path], masks: Mapping[str, Path]) -> dict[str, Path]:
    """Map image names to masks: a mask has its image's name, or where no other has it, its stem.

    The suffixes may differ: NAME.jpg and NAME.png, a folder or NAME.zip and NAME.nii.gz. nnU-Net's
    NAME_0000.nii.gz is the only channel of NAME.nii.gz.
    """
    own = _by_stem({name: path for name, path in images.items() if name not in masks})
    other = _by_stem({name: path for name, path in masks.items() if name not in images})
    single = {stem.removesuffix(_FIRST): name for stem, name in own.items() if stem.endswith(_FIRST)}
    several = {stem.removesuffix("_0001") for stem in own if stem.endswith("_0001")}
    own |= {stem: name for stem, name in single.items() if stem not in own and stem not in several}
    renamed = {other[stem]: own[stem] for stem in own.keys() & other.keys()}
    return {renamed.get(name, name): path for name, path in masks.items()}


def _by_stem(paths: Mapping[str, Path]) -> dict[str, str]:
    """Map stems to names, without the stems of several."""
    stems: dict[str, list[str]] = {}
    for name, path in paths.items():
        stems.setdefault(stem_of(path), []).append(name)
    return {stem: names[0] for stem, names in stems.items() if len(names) == 1}


def _advice(columns: Sequence[str]) -> str:
    """What to do about a usual fault of a first line, or nothing."""
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t"):
        return "; separate the columns by commas"
    small = [column.strip().lower() for column in columns]
    return "; write them in small letters" if {"file"} <= {*small} <= {"file", "patient", "split"} else ""


def read_rows(path: Path, site: str, problems: list[str]) -> dict[str, Row]:
    """Read cases.csv by file name; empty without the file. Problems are appended to `problems`."""
    if not path.is_file():
        return {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, skipinitialspace=True)
            columns = reader.fieldnames or []
            lines = [(reader.line_num, line) for line in reader]
    except UnicodeDecodeError:
        problems.append(
            f"{site}/{CASES}: cannot be read as CSV: it is not in UTF-8; save it again in UTF-8 "
            "(in Excel: CSV UTF-8)"
        )
        return {}
    except csv.Error as error:
        problems.append(f"{site}/{CASES}: cannot be read as CSV: {error}")
        return {}
    if "file" not in columns or not set(columns) <= {"file", "patient", "split"}:
        problems.append(
            f"{site}/{CASES}: expected the columns file, patient, split (the last two are optional), "
            f"found {', '.join(columns) or 'none'}{_advice(columns)}"
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
        name = unicodedata.normalize("NFC", name)
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
