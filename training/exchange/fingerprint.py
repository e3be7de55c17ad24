"""Give a version that was made elsewhere a fingerprint, from scans of where it came from.

An imported model does not say what its training scans look like, so that no lens can be fitted for it. An
operator who has such scans of two groups or more (hospitals, scanners) makes another version of it that does:
the same files, and `fingerprint.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_store.artefact import Artefact
from model_store.errors import LocumStoreError
from model_store.lens import FINGERPRINT, Fingerprint, seen_of
from model_store.manifest import ModelManifest
from model_store.preprocessing import PreparedVolume, prepare_for
from model_store.store import Store
from model_store.task import Task
from training.data.scan_files import read_scan, scans_in, stem_of
from training.errors import ImportRefused

_FEWEST_GROUPS, _FEWEST_PATIENTS = 2, 2


def made(store: Store, artefact: Artefact, folders: Sequence[Path]) -> Artefact[ModelManifest]:
    """Publish the version with a fingerprint of the scans in these folders, a group each.

    Raises ImportRefused for a version that is no single model, for too few groups or patients, and for a scan
    that does not fit the task.
    """
    try:
        model = artefact.expect(ModelManifest)
    except LocumStoreError as error:
        raise ImportRefused(f"{artefact}: expected one model: {error}") from error
    if len(folders) < _FEWEST_GROUPS:
        raise ImportRefused(
            f"expected {_FEWEST_GROUPS} folders or more, each with the scans of a hospital or a scanner, "
            f"found {len(folders)}: one does not say how far hospitals are apart"
        )
    manifest = model.manifest
    groups = [seen_of(_images(folder, manifest.task)) for folder in folders]
    for folder, seen in zip(folders, groups, strict=True):
        patients = seen["field"].patients if seen else 0
        if patients < _FEWEST_PATIENTS:
            raise ImportRefused(
                f"{folder}: expected scans of {_FEWEST_PATIENTS} patients or more, found {patients}"
            )
    found = Fingerprint.of(groups)
    details = {**manifest.lineage.details, "fingerprint_of": [seen["field"].patients for seen in groups]}
    lineage = manifest.lineage.model_copy(update={"parents": (model.digest,), "details": details})
    files = {name: model.read(name) for name in manifest.files}
    return store.publish(
        manifest.model_copy(update={"lineage": lineage, "files": {}}),
        {**files, FINGERPRINT: found.to_bytes()},
    ).expect(ModelManifest)


def _images(folder: Path, task: Task) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for path in scans_in(folder).values():
        try:
            prepared = prepare_for(task, read_scan(path))
            patient = task.patient_of(stem_of(path))
        except LocumStoreError as error:
            raise ImportRefused(f"{path}: {error}") from error
        if isinstance(prepared, PreparedVolume):
            yield patient, prepared.volume[np.newaxis]
        else:
            yield patient, prepared.slices
