"""FedBiCross from the command line to artefacts, and the same bytes after kills."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from benchmarks.harness import forked
from model_store.store import Store
from tests.helpers.training.killing import Killable
from training.data.federation import load_federation
from training.local.site import SiteData
from training.methods.fedbicross.method import SYNTHESIS
from training.phantom.shapes import write_shapes

SITES = ("elm", "fir", "hazel")
CONFIG = {
    "width": 1,
    "local_epochs": 2,
    "batch_size": 8,
    "probes": 8,
    "min_silhouette": -1,
    "epochs": 2,
    "steps": 4,
    "synthesis_batch": 6,
    "outer_steps": 2,
    "checkpoint_every": 2,
    "personal_epochs": 1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("shapes"), SITES, images_per_site=20, size=8)


def test_federate_fedbicross_publishes_clusters_personal_models_and_report(data, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"method": CONFIG, "run": {"seed": 2}}))
    command = ["--method", "fedbicross", "--data", data, "--config", config, "--out", tmp_path / "store"]
    command += ["--consent", "elm", "--workers", 0, "--run", tmp_path / "run"]
    done = forked.run("training.federate", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "personalise 1, test 1, export 1; about " in done.stdout
    assert "synthesise+bilevel 4/4" in done.stdout
    store = Store(tmp_path / "store")
    assert store.versions.names() == ["shapes", "shapes.cluster-1", "shapes.cluster-2", "shapes.elm"]
    manifest = store.open("shapes").manifest
    assert manifest.kind == "clusters"
    assert set(manifest.assignment) == set(SITES)
    assert manifest.clusters == {k: store.open(f"shapes.cluster-{k}").digest for k in ("1", "2")}
    assert manifest.personal == {"elm": store.open("shapes.elm").digest}
    assert all(sum(row.values()) == pytest.approx(1) for row in manifest.mixing.values())
    assert set(manifest.silhouettes) == {"2"}
    elm = store.open("shapes.elm")
    assert (elm.manifest.role, elm.manifest.site, elm.manifest.part_of) == ("inside", "elm", "shapes")
    federation = load_federation(data)
    site = federation.site("elm")
    images = SiteData.load(site.assigned(dict.fromkeys(site.patients, "train")), federation.task).train.images
    session = onnxruntime.InferenceSession(
        (elm.path / "graph.onnx").read_bytes(), providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(["probabilities"], {"image": images})
    assert found.shape == (20, 3)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    sent = {name: site["sent"] for name, site in record["rounds"][0]["sites"].items()}
    # One upload: a float32 per parameter and statistic, an int64 per counter.
    weights = sum(t.nbytes for t in _tensors(elm.path / "weights.safetensors"))
    assert {entry["model"] for entry in sent.values()} == {weights}
    uploads = [e["phase"] for e in record["rounds"] for s in e["sites"].values() if "model" in s["sent"]]
    assert uploads == ["local"] * 3
    received = [(e["phase"], s["received"]) for e in record["rounds"] for s in e["sites"].values()]
    assert [found for found in received if found[1]] == (
        [("local", {"seed": 8})] * 3 + [("personalise", {"cluster": weights})] * 3
    )
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Clusters" in report
    assert report.count("data:image/png;base64,") == 2


def _tensors(path: Path):
    from safetensors.numpy import load_file

    return load_file(path).values()


@pytest.fixture(scope="module")
def killable(data):
    return Killable(data, "fedbicross", **CONFIG)


def digests(root: Path) -> dict[str, str]:
    store = Store(root / "store")
    assert all(len(store.versions.of(name)) == 1 for name in store.versions.names())
    return {name: store.open(name).digest for name in store.versions.names()}


def phases(root: Path) -> list[str]:
    """The phases of the rounds on disk, in order."""
    lines = (root / "run" / "history.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line)["phase"] for line in lines if line.endswith("\n")]


@pytest.mark.timeout(200)
def test_fedbicross_killed_in_every_stage_publishes_the_same_bytes(killable, tmp_path):
    assert killable.run(tmp_path / "whole", workers=1)
    whole = digests(tmp_path / "whole")
    assert {"shapes", "shapes.cluster-1", "shapes.elm", "shapes.fir", "shapes.hazel"} <= set(whole)
    steps = phases(tmp_path / "whole").count(SYNTHESIS)
    assert steps == 4
    draw, root, kills = random.Random(0), tmp_path / "killed", []
    # After local training, clustering, each part of the synthesis, and personalisation. No delay in Stage 2,
    # since the stage could end before the kill.
    for rounds, delay in ((1, 0.15), (2, 0), (3, 0), (4, 0), (5, 0), (7, 0.15)):
        if not killable.run(root, 1, (rounds, draw.uniform(0, delay))):
            kills.append(phases(root))
    while not killable.run(root, workers=1):
        pass
    assert len(kills) >= 3
    # At least one kill struck when a part of Stage 2 was done.
    assert any(0 < done.count(SYNTHESIS) < steps for done in kills), kills
    assert digests(root) == whole
