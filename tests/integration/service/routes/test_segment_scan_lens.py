"""`personalization=scan` of a model of which the scans are known: a lens of the scan, at once or by a job."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from model_store.digest import sha256
from model_store.lens import FINGERPRINT, Lens, fit
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.preprocessing import prepare_for
from model_store.scan import decode
from model_store.store import Store
from model_store.task import Task
from service.worker.runner import run_job
from tests.integration.service.routes.test_segment_volume import graph
from tests.integration.service.worker.test_lens import (
    AT,
    SIDES,
    SLICES,
    VOLUMES,
    fingerprint,
    images_of,
    nifti,
    phantom,
)

TASKS = {"slices": SLICES, "volumes": VOLUMES}


@pytest.fixture(scope="module")
def api(
    start: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
    threshold_graph: Callable[..., bytes],
) -> Any:
    root = tmp_path_factory.mktemp("lenses") / "store"
    graphs = {"slices": threshold_graph(AT, slope=4.0), "volumes": graph(1, AT)}
    for name, task in TASKS.items():
        manifest = ModelManifest(
            name=name,
            task=task,
            network=NetworkSpec(name="graph", arguments={}),
            lineage=Lineage(method="imported", run="test", sites=(), rounds=0, seed=0),
        )
        files = {WEIGHTS: b"", GRAPH: graphs[name], FINGERPRINT: fingerprint(task).to_bytes()}
        Store(root).publish(manifest, files)
        Store(root).publish(
            manifest.model_copy(update={"name": f"{name}-damaged"}), {**files, FINGERPRINT: b"{}"}
        )
    return start(root)


def mask_of(answer: Any) -> NDArray[np.bool_]:
    assert answer.status_code == 200, answer.text
    return np.asarray(nib.Nifti1Image.from_bytes(gzip.decompress(answer.content)).dataobj) > 0


def dice(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    return float(2 * (one & other).sum() / (one.sum() + other.sum()))


def lens_of_scan(task: Task, scan: bytes) -> Lens:
    """That of a cohort of this one scan."""
    images = images_of(prepare_for(task, decode(scan)))
    made = fit(lambda: [("p", images)], fingerprint(task))
    assert made is not None
    return made.lens


@pytest.mark.parametrize("model", TASKS)
def test_an_inverted_scan_is_negated_at_once_and_by_a_job(api: Any, model: str) -> None:
    voxels, truth = phantom(990)
    scan = nifti(260 - voxels)
    usual = dice(mask_of(api.segment(nifti(voxels), model=model)), truth)
    asked = {"model": model, "personalization": "scan", "output": "nifti"}
    at_once = api.segment(scan, **asked)
    assert dice(mask_of(at_once), truth) > usual - 0.03 > 0.77
    assert dice(mask_of(api.segment(scan, model=model)), truth) < 0.1
    assert at_once.headers["locum-personalization"] == "scan"
    assert "scan-negated" in at_once.headers["locum-warning-names"]
    report = api.segment(scan, **{**asked, "output": "json"}).json()
    assert report["receipt"]["lens"] == sha256(lens_of_scan(TASKS[model], scan).to_bytes())
    assert report["receipt"]["network"]["name"] == f"{model}@1"
    assert any("looks inverted" in warning for warning in report["warnings"])
    fields = {name: (None, value) for name, value in asked.items()}
    later = api.client.post(
        "/segment", files={**fields, "scan": ("s.nii.gz", scan)}, headers={"Prefer": "respond-async"}
    )
    assert later.status_code == 202, later.text
    job = later.json()["id"]
    run_job(job, api.settings)
    by_job = api.client.get(f"/jobs/{job}/result")
    assert np.array_equal(mask_of(by_job), mask_of(at_once))
    assert by_job.headers["locum-warning-names"] == at_once.headers["locum-warning-names"]


@pytest.mark.parametrize("model", TASKS)
def test_a_scan_of_noise_is_seen_as_it_is(api: Any, model: str) -> None:
    noise = ndimage.gaussian_filter(np.random.default_rng(3).normal(100, 40, SIDES), 2).astype(np.float32)
    asked = {"model": model, "output": "json", "guard": "warn"}
    report = api.segment(nifti(noise), personalization="scan", **asked).json()
    assert report["receipt"]["lens"] is None
    assert any("the network saw it as it is" in warning for warning in report["warnings"])
    assert report["labels"] == api.segment(nifti(noise), **asked).json()["labels"]


def test_what_the_network_cannot_do_is_refused_and_a_damaged_fingerprint_named(api: Any) -> None:
    scan = nifti(phantom(990)[0])
    listed = {model["name"]: model for model in api.client.get("/models").json()["models"]}
    assert {"scan", "hospital", "global"} <= {*listed["slices"]["personalizations"]}
    refused = api.segment(scan, model="slices", personalization="scan", preset="tent")
    assert refused.status_code == 422, refused.text
    damaged = api.segment(scan, model="slices-damaged", personalization="scan")
    assert damaged.status_code == 503
    assert "slices-damaged@1: fingerprint.json is no fingerprint" in damaged.json()["detail"]
