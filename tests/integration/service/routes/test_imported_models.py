"""Versions that were imported are served, adapted, judged, assigned, taken back and exported like those of a
federation."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.manifest import GRAPH
from model_store.store import Store
from service.worker.runner import run_job
from tests.helpers.model_store.other_formats import SUFFIXES, in_format
from tests.helpers.training.bundles import SPLEEN, by_monai, make_bundle
from tests.helpers.training.make_nnunet_folder import phantom, save
from tests.helpers.training.nnunet_folders import make_nnunet_folder
from tests.helpers.training.served_volumes import mask_of
from training.exchange import bundle, fingerprint, imported, nnunet, to_bundle
from training.exchange.source import Source

WHO = {"actor": "ada", "reason": "better on our validation cases"}
SERVING = "/hospitals/north/serving/organ"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bundles as versions of `organ`, `spleen` with a window, an nnU-Net with two folds, and "
    "`blob`, one with one."""
    root = tmp_path_factory.mktemp("imported")
    opened = Store(root / "store")
    for seed in (0, 1):
        with Source(make_bundle(root / f"bundle-{seed}", before=SPLEEN[:3], seed=seed)) as source:
            imported.publish(opened, "organ", bundle.read(source))
    with Source(make_bundle(root / "spleen")) as source:
        imported.publish(opened, "spleen", bundle.read(source))
    make_nnunet_folder(root / "nnunet", folds=("0", "1"))
    # Of training scans of 20 to 30 voxels, as the phantom's.
    shapes, spacings = [[18, 24, 26], [20, 26, 30]], [[2, 1, 1], [2, 1, 1]]
    fingerprint = {"spacings": spacings, "shapes_after_crop": shapes}
    (root / "nnunet" / "dataset_fingerprint.json").write_text(json.dumps(fingerprint))
    with Source(root / "nnunet") as source:
        imported.publish(opened, "blobs", nnunet.read(source))
        imported.publish(opened, "blob", nnunet.read(source, ["0"], mirror=False))
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


@pytest.mark.parametrize("model", ["blobs", "spleen"])
def test_a_scan_of_another_thing_is_refused_before_it_is_a_job(api: Any, tmp_path: Path, model: str) -> None:
    """A volume of 130 mm for a network of 30 mm; one in other units than the window of a bundle."""
    far = model == "blobs"
    mm, values = ((8.0, 9.0, 10.0), 1.0) if far else ((1.0, 1.0, 2.0), 1e-4)
    # A network's grid of few voxels is allowed, however few the scan's are.
    shape = (16, 14, 10) if far else (30, 26, 20)
    image = phantom(np.random.default_rng(3), shape)[0] * values + 2000 * (model == "spleen")
    save(tmp_path / "scan.nii", image.astype(np.float32), mm)
    content = (tmp_path / "scan.nii").read_bytes()
    jobs = api.client.get("/jobs").json()

    refused = api.segment(content, model=model)

    assert (refused.status_code, refused.json()["type"]) == (422, "urn:locum:problem:scan-unlike-task")
    said = "training had 26 to 30" if model == "blobs" else "what the network looks for, -57 to 164"
    assert said in refused.json()["detail"]
    assert api.client.get("/jobs").json() == jobs


def test_imported_versions_say_what_their_own_networks_are_adapted_by(api: Any) -> None:
    listed = {each["name"]: each for each in api.client.get("/models").json()["models"]}
    assert (listed["organ"]["masks"], "scan" in listed["organ"]["personalizations"]) == ("optional", True)
    for name in ("blobs", "blob"):
        assert (listed[name]["masks"], listed[name]["presets"]) == ("required", ["auto", "masks"])
        assert listed[name]["summary"].endswith("not without: its network has instance norm")
        assert "scan" not in listed[name]["personalizations"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_other_formats_are_answered_as_the_nifti_and_a_mask_of_ours_is_taken_back(
    api: Any, scan: Path, tmp_path: Path, suffix: str
) -> None:
    content = in_format(scan, tmp_path, suffix)
    np.testing.assert_array_equal(
        _mask(api.segment(content, model="organ@1")), _mask(api.segment(scan.read_bytes(), model="organ@1"))
    )
    own = api.segment(content, model="organ@1", output="nrrd").content
    client = api.client
    client.put("/hospitals/west", json={"name": "West"}).raise_for_status()
    place = f"{client.post('/hospitals/west/cohorts').headers['location']}/scans/p1{suffix}"
    client.put(place, content=content).raise_for_status()
    drawn = client.put(f"{place}/mask?model=organ", content=own)
    assert (drawn.status_code, drawn.json()["values"]) == (201, [0, 1, 2]), drawn.text


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


@pytest.mark.filterwarnings("ignore")  # of MONAI
@pytest.mark.parametrize("model", ["organ", "blob"])
def test_an_imported_version_is_adapted_judged_assigned_and_exported_to_monai(
    api: Any, store: Path, scan: Path, tmp_path: Path, model: str
) -> None:
    client, parent = api.client, Store(store).open(model)
    client.put("/hospitals/east", json={"name": "East"}).raise_for_status()
    cohort = client.post("/hospitals/east/cohorts").headers["location"]
    for patient in range(4):
        image, mask = phantom(np.random.default_rng(100 + patient), (26, 24, 18))
        for place, values in (("", image), (f"/mask?model={model}", mask)):
            save(tmp_path / "file.nii", values, (1.0, 1.0, 2.0))
            content = (tmp_path / "file.nii").read_bytes()
            client.put(f"{cohort}/scans/p{patient}.nii{place}", content=content).raise_for_status()
    options = {"steps": 40, "folds": 2, "learning_rate": 0.03, "augment": False}
    asked = {"cohort": cohort.rpartition("/")[2], "model": model, "options": options}
    accepted = client.post("/hospitals/east/adaptations", json=asked)
    assert accepted.status_code == 202, accepted.text
    run_job(accepted.json()["id"], api.settings)
    job = client.get(f"/jobs/{accepted.json()['id']}").json()
    assert job["state"] == "succeeded", job["reason"]
    assert job["gate"]["passed"], "\n".join(str(c) for c in job["gate"]["checks"])
    candidate = Store(store).open(job["candidate"]["reference"])
    assert [*candidate.manifest.lineage.parents] == [parent.digest]

    body = {"version": str(candidate), **WHO}
    place = f"/hospitals/east/serving/{model}"
    client.put(place, json=body, headers={"If-None-Match": "*"}).raise_for_status()
    served = _mask(api.segment(scan.read_bytes(), model=model, hospital="east"))
    np.testing.assert_array_equal(served, mask_of(candidate, scan))
    assert (served != mask_of(parent, scan)).mean() > 0.01

    to_bundle.write(candidate, tmp_path / "exported", closest=model == "blob")
    task, _ = to_bundle.closest_to(candidate.manifest.task)
    expected = mask_of(candidate, scan, task)
    assert sorted(np.bincount(expected.ravel()))[-2] > 100
    assert np.mean(by_monai(tmp_path / "exported", scan) != expected) < 1e-4


def body(seed: int) -> NDArray[np.float32]:
    """A scan with a bright organ off its centre, varied by seed as patients vary."""
    draw = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, side) for side in (30, 26, 20)), indexing="ij"))
    centre = draw.normal([0.3, -0.2, 0.0], 0.05).reshape(3, 1, 1, 1)
    organ = np.square((grid - centre) / [[[[0.5]]], [[[0.45]]], [[[0.6]]]]).sum(axis=0) < 1
    return (100 + 60 * organ + draw.normal(0, 8, organ.shape)).astype(np.float32)


def test_an_imported_nnunet_is_fitted_without_masks_by_scans_of_where_it_came_from(
    api: Any, store: Path, tmp_path: Path
) -> None:
    """Instance norm: nothing of it moves, and inverted scans are put right."""

    def written(place: Path, values: NDArray[np.float32]) -> bytes:
        save(place, values, (1.0, 1.0, 2.0))
        return place.read_bytes()

    for group, gain in (("north", 1.0), ("south", 1.3)):
        (tmp_path / group).mkdir()
        for patient in range(4):
            written(tmp_path / group / f"{patient}.nii.gz", body(10 * len(group) + patient) ** gain)
    opened = Store(store)
    assert "scan" not in _listed(api, "blob")["personalizations"]
    known = fingerprint.made(opened, opened.open("blob"), [tmp_path / "north", tmp_path / "south"])
    listed = _listed(api, "blob")
    assert (listed["masks"], listed["presets"]) == ("optional", ["auto", "masks"])

    client = api.client
    client.put("/hospitals/dune", json={"name": "Dune"}).raise_for_status()
    cohort = client.post("/hospitals/dune/cohorts").headers["location"]
    for patient in range(4):
        content = written(tmp_path / "file.nii", 260 - body(200 + patient))
        client.put(f"{cohort}/scans/p{patient}.nii", content=content).raise_for_status()
    asked = {"cohort": cohort.rpartition("/")[2], "model": "blob", "options": {"unlike": "include"}}
    accepted = client.post("/hospitals/dune/adaptations", json=asked)
    assert accepted.status_code == 202, accepted.text
    run_job(accepted.json()["id"], api.settings)
    job = client.get(f"/jobs/{accepted.json()['id']}").json()
    assert job["state"] == "succeeded", job["reason"]
    assert job["gate"]["passed"], "\n".join(str(c) for c in job["gate"]["checks"] if not c["passed"])
    assert job["result"]["lens"]["negated"]
    candidate = opened.open(job["candidate"]["reference"])
    assert candidate.manifest.files[GRAPH] == known.manifest.files[GRAPH]

    place = "/hospitals/dune/serving/blob"
    made = client.put(place, json={"version": str(candidate), **WHO}, headers={"If-None-Match": "*"})
    assert made.status_code == 200, made.text
    upright, inverted = (written(tmp_path / "one.nii", each) for each in (body(300), 260 - body(300)))
    usual = _mask(api.segment(upright, model="blob"))
    own, before = (_mask(api.segment(inverted, model="blob", **more)) for more in ({"hospital": "dune"}, {}))
    # The weights are random, so that masks depend on little of the scan.
    away = np.mean(before != usual)
    assert away > 0.03
    assert np.mean(own != usual) < away / 2
    # One scan alone, too.
    alone = api.segment(inverted, model="blob", personalization="scan")
    assert "scan-negated" in alone.headers["locum-warning-names"]
    assert np.mean(_mask(alone) != usual) < away / 2
    tag = made.headers["etag"]
    client.post(f"{place}/rollback", json=WHO, headers={"If-Match": tag}).raise_for_status()
    again = _mask(api.segment(inverted, model="blob", hospital="dune"))
    np.testing.assert_array_equal(again, before)


def _listed(api: Any, name: str) -> dict[str, Any]:
    models: list[dict[str, Any]] = api.client.get("/models").json()["models"]
    return next(each for each in models if each["name"] == name)
