"""Averaging methods and methods with personal models, from the command line to graphs that serve."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from model_store.artefact import Artefact
from model_store.store import Store
from personalization.metrics import metrics_of
from personalization.networks import build
from personalization.state import from_safetensors
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.federation import load_federation
from training.errors import PublishError
from training.federate import federate
from training.methods.registry import method as find_method
from training.phantom import write_federation
from training.phantom.shapes import write_shapes
from training.run import Run, execute

SITES = ("aster", "birch")
PARTS = ("fedbn", "fedper", "fedrep")
# They have a global model, too.
FULL = ("ditto", "pfedme", "fedsoup")
PERSONAL = (*PARTS, *FULL)
# Methods of which every site has a model.
OWN = (*PERSONAL, "local-only")
SMALL = {"width": 2, "rounds": 2, "batch_size": 8, "least_steps": 2}


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_federation(tmp_path_factory.mktemp("phantom"), SITES, patients_per_site=3, size=16)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes"), ("elm", "fir"), images_per_site=12, size=8)


def run_of(data: Path, name: str, **settings: object) -> Run:
    config = find_method(name).config(**SMALL)
    return Run(load_federation(data), name, config, RunConfig(**{"seed": 4, "consent": "all", **settings}))


def check_graph(artefact: Artefact) -> None:
    """The graph answers as the network with the published weights."""
    network = build(artefact.manifest.network.name, **artefact.manifest.network.arguments)
    network.load_state_dict(from_safetensors(artefact.read("weights.safetensors")))
    image = np.random.default_rng(0).normal(size=(3, 1, 16, 16)).astype(np.float32)
    expected = torch.softmax(network.eval()(torch.from_numpy(image)), dim=1).detach().numpy()
    session = onnxruntime.InferenceSession(artefact.read("graph.onnx"), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"image": image})[0], expected, atol=1e-5)


@pytest.mark.parametrize("name", OWN)
def test_from_the_command_line_to_graphs_that_serve(scans: Path, tmp_path: Path, monkeypatch, name) -> None:
    # Overlays are drawn in processes of their own, which take seconds to start.
    monkeypatch.setattr("training.report.write_site_pages", lambda result, folder: {})
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"method": SMALL}))
    app = typer.Typer()
    app.command()(federate)
    command = ["--method", name, "--data", scans, "--out", tmp_path / "store", "--workers", 0]
    command += ["--config", tmp_path / "tiny.yaml", "--consent", "aster"]
    done = CliRunner().invoke(app, [str(argument) for argument in command])
    assert done.exit_code == 0, done.output
    store = Store(tmp_path / "store")
    shared = ["global"] if name in FULL else []
    assert store.versions.names() == ["phantom", "phantom.aster", *(f"phantom.{label}" for label in shared)]
    manifest, part = store.open("phantom").manifest, store.open("phantom.aster")
    assert manifest.kind == "personal-models"
    digest = store.open("phantom.global").digest if name in FULL else None
    assert manifest.global_model == digest
    assert manifest.inside == {"aster": part.digest}
    assert (part.manifest.role, part.manifest.site, part.manifest.part_of) == ("inside", "aster", "phantom")
    assert manifest.metrics == {
        f"{label}.{metric}": value
        for label in ("aster", *shared)
        for metric, value in store.open(f"phantom.{label}").manifest.metrics.items()
    }
    check_graph(part)
    (folder,) = (tmp_path / "runs").iterdir()
    record = json.loads((folder / "record.json").read_text())
    assert record["rounds"][-1]["absent"] == {"birch": "no consent to 'export'"}
    assert "own Dice" in (folder / "report.html").read_text()


@pytest.mark.parametrize("name", ["scaffold", "moon", "feddc", "fedavgm", "centralised", "feddg"])
def test_the_graph_of_a_global_model_serves(scans: Path, tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / "store")
    execute(run_of(scans, name), tmp_path / "run", workers=0, store=store)
    assert store.versions.names() == ["phantom"]
    check_graph(store.open("phantom"))


@pytest.mark.parametrize("name", PARTS)
def test_only_the_bytes_of_the_shared_part_travel(scans: Path, tmp_path: Path, name: str) -> None:
    job = run_of(scans, name)
    result = execute(job, tmp_path / "run", workers=0)
    algorithm = job.algorithm()
    whole = build(algorithm.network.name, **algorithm.network.arguments).state_dict()
    shared = sum(t.numel() * t.element_size() for n, t in whole.items() if not algorithm.is_own(n))
    everything = sum(tensor.numel() * tensor.element_size() for tensor in whole.values())
    assert 0 < shared < everything
    for entry in result.history:
        for site in entry.sites.values():
            sent = {group: count for group, count in site.sent.items() if group != "metrics"}
            if entry.phase == "train":
                assert sent == {"weights": shared}
            if entry.phase in ("train", "validate"):
                assert site.received == {"weights": shared}
            if entry.phase == "export":
                # A sum and a number of each metric.
                assert sent == {
                    "personal": everything,
                    "personal_score": 16 * len(metrics_of("segmentation")),
                }


# One of each way to publish; `test_domain_randomisation` trains every method on classes.
@pytest.mark.parametrize("name", ["scaffold", "moon", "fedbn", "fedrep", "ditto"])
def test_it_classifies(shapes: Path, tmp_path: Path, name: str) -> None:
    result = execute(run_of(shapes, name), tmp_path / "run", workers=0, store=Store(tmp_path / "store"))
    expected = "projected" if name == "moon" else "resnet18"
    assert {draft.network.name for draft in result.publication.models} == {expected}
    assert all(0 <= draft.metrics["val_accuracy"] <= 1 for draft in result.publication.models)
    kind = result.artefacts[-1].manifest.kind
    assert kind == ("personal-models" if name in PERSONAL else "model")


@pytest.mark.parametrize("name", FULL)
def test_without_consent_a_method_with_a_global_model_publishes_it_alone(
    scans: Path, tmp_path: Path, name: str
) -> None:
    store = Store(tmp_path / "store")
    result = execute(run_of(scans, name, consent=()), tmp_path / "run", workers=0, store=store)
    assert [artefact.manifest.kind for artefact in result.artefacts] == ["model"]
    trained = [entry for entry in result.history if entry.phase == "train"]
    sent = {frozenset(site.sent) for entry in trained for site in entry.sites.values()}
    assert sent == {frozenset({"weights", "scores", "metrics"})}


@pytest.mark.parametrize("name", FULL)
def test_differential_privacy_covers_what_a_method_with_a_global_model_sends(
    scans: Path, tmp_path: Path, name: str
) -> None:
    privacy = {"groups": {"weights": {"clip": 1.0, "noise": 2.0}}}
    result = execute(run_of(scans, name, privacy=privacy), tmp_path / "run", workers=0)
    for entry in result.history:
        for site in entry.sites.values():
            assert set(site.privacy) == ({"weights"} if entry.phase == "train" else set())


def test_a_site_that_refuses_features_sends_no_amplitudes_and_gets_the_others(
    scans: Path, tmp_path: Path
) -> None:
    job = run_of(scans, "feddg", egress={"aster": ["weights", "statistics"]})
    result = execute(job, tmp_path / "run", workers=0)
    phases = {entry.phase: entry for entry in result.history}
    sent = {site: entry.sent for site, entry in phases["amplitudes"].sites.items()}
    received = {site: entry.received for site, entry in phases["bank"].sites.items()}
    images = phases["describe"].sites["birch"].weight
    # Three times three frequencies of one channel, in float32.
    assert sent == {"aster": {}, "birch": {"amplitudes": 36 * images}}
    assert received == {"aster": {"bank": 36 * images}, "birch": {"bank": 0}}
    assert all({"weights", "scores", "metrics"} == {*entry.sent} for entry in phases["train"].sites.values())


def test_fedprox_with_mu_0_is_a_run_of_fedavg(scans: Path, tmp_path: Path) -> None:
    prox = run_of(scans, "fedprox")
    config = prox.config.model_copy(update={"mu": 0.0})
    runs = {
        "prox": Run(prox.federation, "fedprox", config, prox.settings),
        "plain": Run(prox.federation, "fedavg", FedAvgConfig(**SMALL), prox.settings),
    }
    found = {
        name: execute(job, tmp_path / name, workers=0).publication.models[0].weights
        for name, job in runs.items()
    }
    assert found["prox"].keys() == found["plain"].keys()
    assert all(torch.equal(found["prox"][name], tensor) for name, tensor in found["plain"].items())


def test_without_consent_nothing_is_published_until_a_hospital_agrees(scans: Path, tmp_path: Path) -> None:
    store, folder = Store(tmp_path / "store"), tmp_path / "run"
    with pytest.raises(PublishError, match=r"'phantom': no site exported its model.*--resume and --consent"):
        execute(run_of(scans, "fedper", consent=()), folder, workers=0, store=store)
    assert store.versions.names() == []
    later = run_of(scans, "fedper", consent=("birch",))
    result = execute(later, folder, workers=0, resume=True, store=store)
    assert store.versions.names() == ["phantom", "phantom.birch"]
    assert [entry.phase for entry in result.history].count("train") == 2


def test_a_site_keeps_its_part_through_rounds_in_which_it_is_not_drawn(scans: Path, tmp_path: Path) -> None:
    job = run_of(scans, "fedbn", participation=0.5)
    job = Run(job.federation, "fedbn", job.config.model_copy(update={"rounds": 4}), job.settings)
    result = execute(job, tmp_path / "run", workers=0)
    drawn = [set(entry.sites) for entry in result.history if entry.phase == "train"]
    assert all(len(sites) == 1 for sites in drawn)
    assert set().union(*drawn) == set(SITES)
    first, second = (draft.weights for draft in result.publication.models)
    own = [name for name in first if job.algorithm().is_own(name)]
    assert any(not torch.equal(first[name], second[name]) for name in own)
