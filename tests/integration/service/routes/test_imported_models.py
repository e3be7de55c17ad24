"""Versions that were imported are served, assigned and taken back like those of a federation."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.store import Store
from tests.helpers.training.bundles import SPLEEN, make_bundle
from tests.helpers.training.make_nnunet_folder import phantom, save
from tests.helpers.training.nnunet_folders import make_nnunet_folder
from tests.helpers.training.served_volumes import mask_of
from training.exchange import bundle, imported, nnunet
from training.exchange.source import Source

WHO = {"actor": "ada", "reason": "better on our validation cases"}
SERVING = "/hospitals/north/serving/organ"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bundles as versions of `organ`, and an nnU-Net with two folds."""
    root = tmp_path_factory.mktemp("imported")
    opened = Store(root / "store")
    for seed in (0, 1):
        with Source(make_bundle(root / f"bundle-{seed}", before=SPLEEN[:3], seed=seed)) as source:
            imported.publish(opened, "organ", bundle.read(source))
    make_nnunet_folder(root / "nnunet", folds=("0", "1"))
    with Source(root / "nnunet") as source:
        imported.publish(opened, "blobs", nnunet.read(source))
    return root / "store"


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scan") / "scan.nii.gz"
    save(path, phantom(np.random.default_rng(3), (30, 26, 20))[0], (1.0, 1.0, 2.0))
    return path


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], store: Path) -> Any:
    return start(store)


def _mask(response: Any) -> NDArray[Any]:
    assert response.status_code == 200, response.text
    found: Any = nib.Nifti1Image.from_bytes(gzip.decompress(response.content))
    return np.asarray(found.dataobj)


@pytest.mark.parametrize("reference", ["organ@1", "organ@2", "blobs@1"])
def test_imported_version_answers_with_its_own_mask(
    api: Any, store: Path, scan: Path, reference: str
) -> None:
    found = _mask(api.segment(scan.read_bytes(), model=reference))

    expected = mask_of(Store(store).open(reference), scan)
    assert len(np.unique(expected)) > 1
    np.testing.assert_array_equal(found, expected)


def test_imported_versions_are_assigned_and_rolled_back(api: Any, store: Path, scan: Path) -> None:
    client = api.client
    first, second = (mask_of(Store(store).open(f"organ@{number}"), scan) for number in (1, 2))
    assert (first != second).any()

    def served() -> NDArray[Any]:
        return _mask(api.segment(scan.read_bytes(), model="organ", hospital="north"))

    client.put("/hospitals/north", json={"name": "North"}, headers={"If-None-Match": "*"}).raise_for_status()
    tag = client.get(SERVING).headers["etag"]
    for version, expected in ((1, first), (2, second)):
        done = client.put(SERVING, json={"version": version, **WHO}, headers={"If-Match": tag})
        assert done.status_code == 200, done.text
        tag = done.headers["etag"]
        np.testing.assert_array_equal(served(), expected)
    back = client.post(f"{SERVING}/rollback", json=WHO, headers={"If-Match": tag})

    assert (back.status_code, back.json()["version"]) == (200, 1), back.text
    np.testing.assert_array_equal(served(), first)
