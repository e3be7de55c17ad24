"""FedIns through the engine and the command line: exchanged bytes and published artefacts."""

from __future__ import annotations

import json
import pickle

import numpy as np
import onnxruntime
import pytest
import torch
import typer
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from model_store.store import Store
from model_store.task import Task
from personalization.fedins import InstanceAdaptive
from personalization.networks import build, build_backbone, initialise
from personalization.state import from_safetensors
from tests.helpers.training.backbones import publish, unet, vit
from training.config import RunConfig
from training.data.federation import load_federation
from training.engine import rounds, worker
from training.federate import federate
from training.methods.fedins.config import FedInsConfig
from training.phantom import write_federation
from training.phantom.shapes import write_shapes
from training.run import Run, execute

SMALL = {"rounds": 2, "entries": 4, "top": 2, "local_epochs": 1, "batch_size": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("phantom")
    return write_federation(root, ("aster", "birch"), patients_per_site=3, size=32)


def test_fedins_never_exchanges_the_backbone(data, tmp_path, monkeypatch):
    federation = load_federation(data)
    store = Store(tmp_path / "store")
    artefact = publish(store.root, federation.task, unet(federation.task), "base")
    config = FedInsConfig(**SMALL).pinned(store, federation.task, "pool")
    job = Run(federation, "fedins", config, RunConfig(seed=4))
    crossed: list[bytes] = [pickle.dumps(job.algorithm())]
    write, answer = rounds.write_tensors, worker.Worker.answer

    def watched(path, state, facts=None, *, durable=False):
        write(path, state, facts, durable=durable)
        if "sites" not in path.relative_to(tmp_path).parts:
            crossed.append(path.read_bytes())

    def answered(self, task):
        crossed.append(pickle.dumps(task))
        result = answer(self, task)
        crossed.append(pickle.dumps(result))
        return result

    monkeypatch.setattr(rounds, "write_tensors", watched)
    monkeypatch.setattr(worker, "write_tensors", watched)
    monkeypatch.setattr(worker.Worker, "answer", answered)
    result = execute(job, tmp_path / "run", workers=0, store=store)
    weights = from_safetensors(artefact.read("weights.safetensors"))
    # The first twelve bytes of every float tensor; the head is excluded, since the pool starts from it.
    marks = {
        name: tensor.flatten()[:3].numpy().tobytes()
        for name, tensor in weights.items()
        if tensor.is_floating_point() and tensor.numel() >= 3 and not name.startswith("conv.")
    }
    assert len(marks) > 50
    assert len(crossed) > 2 * 4 * 3
    assert not [name for name, mark in marks.items() for content in crossed if mark in content]
    # Control: the marks are found in the backbone's own file.
    assert all(mark in artefact.read("weights.safetensors") for mark in marks.values())
    sent = {group for entry in result.history for site in entry.sites.values() for group in site.sent}
    received = {group for entry in result.history for site in entry.sites.values() for group in site.received}
    assert sent == {"weights", "scores", "usage", "queries", "statistics", "fingerprint", "metrics", "tested"}
    assert received == {"weights", "centre"}
    with torch.device("meta"):
        network = InstanceAdaptive(build_backbone("unet", **unet(federation.task).arguments), 2, 4, 2)
    numbers = sum(parameter.numel() for parameter in network.pool.parameters())
    (train, _) = (entry for entry in result.history if entry.phase == "train")
    assert train.sites["aster"].sent["weights"] == train.sites["aster"].received["weights"] == 4 * numbers
    assert result.publication.details["exchanged"]["pool"] == 4 * numbers


def invoke(method: str, data: object, root, *arguments: object):
    app = typer.Typer()
    app.command()(federate)
    command = ["--method", method, "--data", data, "--out", root / "store", "--workers", 0, *arguments]
    return CliRunner().invoke(app, [str(argument) for argument in command])


def _check_served(store: Store, name: str, backbone: str, image: np.ndarray) -> None:
    """Compare the published graph with its backbone and pool, combined again."""
    artefact = store.open(name)
    manifest = artefact.manifest
    assert manifest.kind == "ssf-pool"
    base = store.by_digest(manifest.backbone)
    assert str(base) == backbone
    network = InstanceAdaptive(
        build_backbone(manifest.network.name, **manifest.network.arguments),
        len(manifest.task.classes),
        manifest.entries,
        manifest.top,
        blocks=manifest.blocks,
    )
    network.backbone.load_state_dict(from_safetensors(base.read("weights.safetensors")))
    network.pool.load_state_dict(from_safetensors(artefact.read("weights.safetensors")))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        artefact.read("graph.onnx"), options, providers=["CPUExecutionProvider"]
    )
    probabilities, entries, similarities, _ = session.run(None, {"image": image})
    with torch.no_grad():
        expected = network.answer(torch.from_numpy(image))
    np.testing.assert_allclose(probabilities, expected.logits.softmax(1).numpy(), atol=1e-5)
    np.testing.assert_array_equal(entries, expected.picked.entries.numpy())
    np.testing.assert_allclose(similarities, expected.picked.similarities.numpy(), atol=1e-5)


def test_federate_fedins_publishes_a_pool_for_a_unet(data, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "training.report.write_site_pages", lambda result, folder: drawn.append(result.publication.kind) or {}
    )
    refused = invoke("fedins", data, tmp_path, "--name", "pool")
    assert refused.exit_code == 2
    assert "train one: --method fedavg" in refused.output
    refused = invoke("fedins", data, tmp_path, "--name", "a pool")
    assert refused.exit_code == 2
    assert "'a pool', of 6 characters: expected at most 128 letters" in refused.output
    task = load_federation(data).task
    publish(tmp_path / "store", task, unet(task), "base")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"method": SMALL, "run": {"seed": 4}}))
    done = invoke("fedins", data, tmp_path, "--name", "pool", "--config", tmp_path / "tiny.yaml")
    assert done.exit_code == 0, done.output
    store = Store(tmp_path / "store")
    image = np.random.default_rng(0).normal(size=(3, 1, 32, 32)).astype(np.float32)
    _check_served(store, "pool", "base@1", image)
    (run,) = (tmp_path / "runs").iterdir()
    record = json.loads((run / "record.json").read_text())
    assert [seen["round"] for seen in record["details"]["key_usage"]] == [0, 1, 2]
    assert {"key_entropy", "dead_keys"} <= record["rounds"][1]["sites"]["aster"]["metrics"].keys()
    report = (run / "report.html").read_text()
    assert "share of the training images" in report
    assert "4 entries, of which an image picks 2" in report
    assert str(tmp_path) not in store.open("pool").manifest.model_dump_json()


def test_federate_fedins_publishes_a_pool_for_a_vit_from_published_weights(tmp_path):
    root = write_shapes(tmp_path / "shapes", sites=("elm", "fir"), images_per_site=12, size=16)
    task = Task.load(root / "task.yaml")
    source = initialise(build("vit", **vit(task).arguments), torch.Generator().manual_seed(1))
    save_file(source.state_dict(), tmp_path / "vit.safetensors")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"method": {**SMALL, "blocks": 1}}))
    arguments = ("--name", "pool", "--config", tmp_path / "tiny.yaml")
    done = invoke("fedins", root, tmp_path, *arguments, "--backbone", tmp_path / "vit.safetensors")
    assert done.exit_code == 0, done.output
    store = Store(tmp_path / "store")
    assert store.versions.names() == ["pool", "pool.backbone"]
    image = np.random.default_rng(0).normal(size=(3, task.in_channels, 16, 16)).astype(np.float32)
    assert store.open("pool").manifest.blocks == 1
    _check_served(store, "pool", "pool.backbone@1", image)
    for change, message in (
        ({"routing": "random"}, "'random' is a control"),
        ({"backbone": "absent"}, "'absent' is not in the store"),
    ):
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"method": {**SMALL, **change}}))
        refused = invoke("fedins", root, tmp_path, *arguments)
        assert refused.exit_code == 2
        assert message in " ".join(refused.output.split())
