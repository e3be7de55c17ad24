"""An ssf-pool is served at once: the answer names a scan's picks, and a hospital's picks are held against the
federation's."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from model_store.manifest import WEIGHTS, SsfPoolManifest
from model_store.preprocessing import prepare
from model_store.scan import decode
from model_store.store import Store
from model_store.task import Task
from personalization.fedins import InstanceAdaptive
from personalization.networks import build_backbone
from personalization.state import from_safetensors
from tests.helpers.service.pool_federation import ENTRIES, TOP, USAGE, publish_pool

AFFINE = np.diag([2.0, 2.0, 3.0, 1.0])
ORGAN = Task(name="organ", labels={"organ": (1,)}, size=(32, 32))
PICTURES = Task(name="pictures", kind="classification", class_names=("a", "b", "c"), size=(16, 16))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> Path:
    from tests.helpers.training.backbones import unet, vit

    root = tmp_path_factory.mktemp("store")
    publish_pool(root, ORGAN, unet(ORGAN), "organ")
    publish_pool(root, PICTURES, vit(PICTURES), "pictures")
    publish_bright(root)
    return root


@pytest.fixture(scope="module")
def api(start: Any, store: Path) -> Any:
    api = start(store)
    for hospital in ("dune", "elm"):
        assert api.client.put(f"/hospitals/{hospital}", json={"name": hospital}).status_code == 201
    return api


@pytest.fixture(scope="module")
def volume(make_nifti: Callable[..., bytes]) -> bytes:
    """Ten slices, so that one run of the graph is not enough."""
    draw = np.random.default_rng(1)
    voxels = draw.normal(size=(32, 32, 10)) * draw.uniform(0.1, 5, size=10) + draw.normal(size=10)
    return make_nifti((100 * voxels).astype(np.int16), AFFINE)


def graph_of(store: Path, name: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    graph = Store(store).open(name).read("graph.onnx")
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def network_of(store: Path, name: str) -> InstanceAdaptive:
    artefact, base = Store(store).open(name), Store(store).open(f"{name}.backbone")
    manifest = artefact.manifest
    assert isinstance(manifest, SsfPoolManifest)
    backbone = build_backbone(manifest.network.name, **manifest.network.arguments)
    network = InstanceAdaptive(backbone, len(manifest.task.classes), manifest.entries, manifest.top)
    backbone.load_state_dict(from_safetensors(base.read(WEIGHTS)))
    network.pool.load_state_dict(from_safetensors(artefact.read(WEIGHTS)))
    return network


def slices_of(scan: bytes, task: Task) -> NDArray[np.float32]:
    return prepare(decode(scan), task).slices


def test_pool_routes_a_volume_as_a_whole_or_by_slice(api: Any, store: Path, volume: bytes) -> None:
    report = api.segment(volume, model="organ", output="json").json()
    slices, session = slices_of(volume, ORGAN), graph_of(store, "organ")
    _, entries, similarities, queries = session.run(None, {"image": slices})
    by_mean = network_of(store, "organ").answer(
        torch.tensor(slices), torch.from_numpy(queries.mean(axis=0, keepdims=True))
    )
    (picked,) = report["picked"]
    assert picked["entries"] == by_mean.picked.entries[0].tolist()
    assert len(picked["entries"]) == TOP
    assert picked["similarities"] == pytest.approx(by_mean.picked.similarities[0].tolist(), abs=1e-5)
    foreground = int((by_mean.logits[:, 1] > by_mean.logits[:, 0]).sum())
    assert report["labels"]["organ"]["voxels"] == pytest.approx(foreground, abs=3)
    by_slice = api.segment(volume, model="organ", output="json", routing="slice").json()
    assert [each["entries"] for each in by_slice["picked"]] == entries.tolist()
    for each, expected in zip(by_slice["picked"], similarities.tolist(), strict=True):
        assert each["similarities"] == pytest.approx(expected, abs=1e-5)
    assert len({tuple(row) for row in entries.tolist()}) > 1
    assert by_slice["receipt"]["options"]["routing"] == "slice"


def test_pool_answers_auto_as_scan_without_a_job(
    api: Any, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    reports = []
    for asked in ("auto", "scan"):
        response = api.segment(make_png(picture), model="organ", personalization=asked, output="json")
        assert response.status_code == 200, response.text
        assert response.headers["locum-personalization"] == "scan"
        assert response.headers["locum-model"] == "organ@1"
        reports.append(response.json())
    assert reports[0]["labels"] == reports[1]["labels"]
    assert reports[0]["picked"] == reports[1]["picked"]
    receipt = reports[0]["receipt"]
    assert receipt["network"] == receipt["model"]
    assert "adapts itself to each scan" in receipt["why"]
    mask = api.segment(make_png(picture), model="organ")
    assert mask.headers["content-type"] == "image/png"
    assert api.client.get("/jobs").json()["jobs"] == []


def test_classifying_pool_reports_its_picked_entries(
    api: Any, store: Path, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    scan = make_png(picture)
    report = api.classify(scan, model="pictures", personalization="scan").json()
    session = graph_of(store, "pictures")
    probabilities, entries, _, _ = session.run(None, {"image": slices_of(scan, PICTURES)})
    assert list(report["probabilities"].values()) == pytest.approx(probabilities[0].tolist(), abs=1e-5)
    assert [each["entries"] for each in report["picked"]] == entries.tolist()


def test_unsupported_options_of_a_pool_are_422(
    api: Any, make_png: Callable[..., bytes], picture: NDArray[np.uint8]
) -> None:
    scan = make_png(picture)
    for fields, detail in (
        ({"model": "organ", "personalization": "global"}, "adapts to every scan by itself"),
        ({"model": "organ", "personalization": "member", "site": "s"}, "adapts to every scan by itself"),
        ({"model": "bright", "routing": "slice"}, "`routing` belongs to an ssf-pool"),
    ):
        refused = api.segment(scan, **fields)
        assert refused.status_code == 422
        assert detail in refused.json()["detail"]
    assert api.segment(scan, model="organ.backbone").json()["type"].endswith("part-of-a-model")
    assert api.segment(scan, model="bright", output="json").json()["picked"] is None
    job = api.client.post("/hospitals/dune/adaptations", json={"model": "organ", "cohort": "0" * 32})
    assert (job.status_code, job.json()["type"]) == (422, "urn:locum:problem:not-adaptable")


def counted(api: Any, hospital: str, scans: int) -> dict[str, Any]:
    """The key usage of the one version, once so many scans are recorded: recording follows each answer."""
    deadline = time.monotonic() + 30
    while True:
        versions = api.client.get(f"/hospitals/{hospital}/serving/organ/key-usage").json()["versions"]
        if sum(version["recent_scans"] for version in versions) >= scans or time.monotonic() > deadline:
            (version,) = versions
            return dict(version)
        time.sleep(0.01)


def test_key_usage_compares_picks_of_a_hospital_with_the_federation(
    api: Any, store: Path, make_png: Callable[..., bytes], volume: bytes
) -> None:
    draw, counts, scans = np.random.default_rng(8), Counter[int](), 6
    for _ in range(scans):
        pixels = (draw.random((32, 32)) ** draw.uniform(0.2, 4) * 255).astype(np.uint8)
        report = api.segment(make_png(pixels), model="organ", hospital="dune", output="json").json()
        for entry in report["picked"][0]["entries"]:
            counts[entry] += 1
    # Sliced or not, a scan counts once; one without a hospital does not count.
    api.segment(volume, model="organ", hospital="elm", output="json", routing="slice")
    api.segment(volume, model="organ", output="json")
    version = counted(api, "dune", scans)
    (day,) = version["days"]
    assert day["day"] == datetime.now(UTC).date().isoformat()
    assert (day["scans"], version["recent_scans"]) == (scans, scans)
    here = [counts[entry] / (TOP * scans) for entry in range(ENTRIES)]
    assert day["shares"] == pytest.approx(here)
    there = [count / sum(USAGE) for count in USAGE]
    assert version["federation"] == pytest.approx(there)
    middle = [(a + b) / 2 for a, b in zip(here, there, strict=True)]
    kullback = [
        sum(p * math.log2(p / m) for p, m in zip(side, middle, strict=True) if p) for side in (here, there)
    ]
    assert version["drift"] == pytest.approx(sum(kullback) / 2)
    assert day["drift"] == version["drift"]
    elm = counted(api, "elm", 1)
    assert elm["recent_scans"] == 1
    assert sum(elm["days"][0]["shares"]) == pytest.approx(1)
    lines = [
        line for line in api.client.get("/metrics").text.splitlines() if "locum_key_usage_drift{" in line
    ]
    assert len(lines) == 2
    (mine,) = (line for line in lines if 'hospital="dune"' in line)
    assert 'model="organ@1"' in mine
    assert float(mine.split()[-1]) == pytest.approx(version["drift"])
    assert api.client.get("/hospitals/dune/serving/bright/key-usage").json()["versions"] == []
    assert api.client.get("/hospitals/nobody/serving/organ/key-usage").status_code == 404
