"""Give a version that was made elsewhere a fingerprint, from scans of where it came from.

An imported model does not say what its training scans look like, so that no lens can be fitted for it. An
operator who has such scans, at best of two groups or more (hospitals, scanners), makes another version of it
that does: the same files, and `fingerprint.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_store.artefact import Artefact
from model_store.errors import LocumStoreError
from model_store.lens import FINGERPRINT, Fingerprint, Kind, Seen, seen_of
from model_store.manifest import ModelManifest
from model_store.preprocessing import PreparedVolume, prepare_for
from model_store.scan import Parts
from model_store.scans.dicom.reading import open_series
from model_store.scans.types import Limits
from model_store.store import Store
from model_store.task import Task
from training.data.scan_files import joined, read_content
from training.data.segmentation.layout import CASES, IMAGES, MASKS, Unmasked, read_unmasked
from training.errors import ImportRefused

# As of a member of a federation.
_FEWEST_PATIENTS = 3
# Patients of each group, in the lineage.
_COUNTS = "fingerprint_of"


def made(store: Store, artefact: Artefact, folders: Sequence[Path]) -> Artefact[ModelManifest]:
    """Publish the version with a fingerprint of the scans in these folders, a group each.

    One folder does not say how far hospitals are apart (`Fingerprint.of_one`).

    Raises ImportRefused for a version that is no single model, for too few patients or none that differ, and
    for a scan that does not fit the task.
    """
    try:
        model = artefact.expect(ModelManifest)
    except LocumStoreError as error:
        raise ImportRefused(f"{artefact}: expected one model: {error}") from error
    manifest = model.manifest
    groups = [_seen_in(folder, manifest.task) for folder in folders]
    for (one, seen), (other, again) in combinations(zip(folders, groups, strict=True), 2):
        if np.array_equal(seen["quantiles"].mean, again["quantiles"].mean):
            raise ImportRefused(
                f"{one} and {other}: expected the scans of two hospitals or scanners, found the same scans; "
                "name one of them"
            )
    try:
        found = Fingerprint.of(groups) if len(groups) > 1 else Fingerprint.of_one(groups[0])
    except ValueError as error:
        raise ImportRefused(f"{folders[0]}: {error}") from error
    details = {**manifest.lineage.details, _COUNTS: [seen["field"].patients for seen in groups]}
    lineage = manifest.lineage.model_copy(update={"parents": (model.digest,), "details": details})
    files = {name: model.read(name) for name in manifest.files}
    return store.publish(
        manifest.model_copy(update={"lineage": lineage, "files": {}}),
        {**files, FINGERPRINT: found.to_bytes()},
    ).expect(ModelManifest)


def said_of(artefact: Artefact[ModelManifest], folders: Sequence[Path]) -> list[str]:
    """What a version that `made` published knows of scans, in words."""
    found = Fingerprint.model_validate_json(artefact.read(FINGERPRINT))
    counts = artefact.manifest.lineage.details[_COUNTS]
    assert isinstance(counts, list)
    said = [f"{folder}: {count} patients" for folder, count in zip(folders, counts, strict=True)]
    if found.factor is not None:
        said.append(
            "one group: how far hospitals are apart is not known from it. The natural squared shift is taken "
            f"for {found.factor:.3g} times the variance between its patients: a lens moves less than with "
            "several groups, and leaves mild shifts as they are. Make it again with scans of another "
            "hospital or scanner in a folder of their own, once you have some"
        )
    return said


def _seen_in(folder: Path, task: Task) -> dict[Kind, Seen]:
    """What the scans of a folder look like. Raises ImportRefused, which names every fault of its files."""
    problems: list[str] = []
    scans = read_unmasked(folder, task, problems)
    if problems:
        raise ImportRefused("\n".join(problems))
    seen = seen_of(_images(scans, task))
    patients = seen["field"].patients if seen else 0
    if patients < _FEWEST_PATIENTS:
        raise ImportRefused(
            f"{folder}: expected scans of {_FEWEST_PATIENTS} patients or more, found {patients}, of "
            f"{len(scans)} scans: {CASES}, or the task's `patient`, says which are of one"
        )
    return seen


def _images(scans: Iterable[Unmasked], task: Task) -> Iterator[tuple[str, NDArray[np.float32]]]:
    owners: dict[str, str] = {}
    for scan in scans:
        place = scan.images[0].parent / scan.name
        contents = [read_content(path) for path in scan.images]
        try:
            read = joined(contents, task)
            prepared = prepare_for(task, read)
            series = _series_of(contents[0]) if read.format == "dicom" else None
        except LocumStoreError as error:
            raise ImportRefused(f"{place}: {error}") from error
        if (values := read.values_of_mask) is not None:
            raise ImportRefused(
                f"{place}: expected a scan, found {values} different values, as masks have: leave masks out, "
                f"or put scans into {IMAGES[0]}/ and masks into {MASKS[0]}/"
            )
        if series is not None and (owner := owners.setdefault(series, scan.patient)) != scan.patient:
            raise ImportRefused(
                f"{place}: expected a scan of another patient than '{owner}', found images of one DICOM "
                "series: put the files of each scan into a folder of its own"
            )
        if isinstance(prepared, PreparedVolume):
            yield scan.patient, prepared.volume[np.newaxis]
        else:
            yield scan.patient, prepared.slices


def _series_of(content: bytes | Parts) -> str | None:
    """The series of a DICOM file that stands alone; None of a folder, and where none is named."""
    if not isinstance(content, bytes):
        return None
    return str(open_series(content, Limits()).headers[0].get("SeriesInstanceUID") or "") or None
