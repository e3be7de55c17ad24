"""FedOAP through the engine and the command line: exchanged bytes and published artefacts."""

from __future__ import annotations

import pickle
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from model_store.store import Store
from personalization.adamw import train_adamw
from personalization.fedoap.parts import split
from personalization.networks import build
from personalization.state import from_safetensors
from tests.helpers.training.sites import TASK
from training.algorithm import Memory
from training.bounds import FeatureBounds
from training.config import RunConfig
from training.data.federation import load_federation
from training.engine import rounds, worker
from training.engine.folder import RunFolder, SiteFolder
from training.federate import federate
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap
from training.methods.fedoap.stages import FirstStage, Own, SecondStage
from training.methods.registry import method as find_method
from training.phantom import write_federation
from training.run import Run, execute

SMALL = {"width": 2, "heads": 4, "rounds": 2, "local_steps": 2, "batch_size": 4, "fine_tune_rounds": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("phantom")
    return write_federation(root, ("aster", "birch", "cedar"), patients_per_site=3, size=32)


def run_of(data: Path, *, consent: object = "all", **settings: object) -> Run:
    config = FedOapConfig(**SMALL, learning_rate=0.01)
    return Run(load_federation(data), "fedoap", config, RunConfig(seed=4, consent=consent, **settings))


def remembered(folder: Path, site: str) -> Memory:
    """The memory of a site after the last round."""
    return SiteFolder(folder, site).load(RunFolder(folder).checkpoint().site_slots[site])


def own_of(folder: Path, site: str) -> Own:
    """What a site has of stage 2 after the last round."""
    return FedOap(FedOapConfig(**SMALL), TASK).second.slot.read(remembered(folder, site))


# Float32 values that training does not reach, written twice: the bytes of a run contain one by chance about
# once in 10^10 runs.
CANARY, MOMENT = 0.012345679, 0.087654321
PATTERN, MOMENTS = (struct.pack("<f", value) * 2 for value in (CANARY, MOMENT))


class Planting(FirstStage):
    """Stage 1 that fills the personal tensors of every site with canaries before each of its steps."""

    def step(self, context, received, memory, data):
        start = self.first_rho(context, received["weights"])
        planted = {name: torch.full_like(tensor, CANARY) for name, tensor in start.items()}
        memory = self.own.write(memory, replace(self.own.read(memory), rho=planted))
        return super().step(context, received, memory, data)


class Planted(FedOap):
    """FedOAP with that stage."""

    stages = (Planting, SecondStage)


def with_planted_moments(*arguments):
    """Take AdamW's steps, then replace all of its moments by another canary."""
    loss, optimiser = train_adamw(*arguments)
    planted = {name: torch.full_like(tensor, MOMENT) for name, tensor in optimiser.moments.items()}
    return loss, replace(optimiser, moments=planted)


@pytest.mark.parametrize("options", [{}, {"kv": "own"}])
def test_fedoap_never_exchanges_personal_tensors_before_the_export(options, data, tmp_path, monkeypatch):
    """A learning rate too small to change a weight keeps the canaries through every step of both stages.

    Moments of personal and shared tensors are never sent. With `kv: own` keys and values are personal.
    """
    config = FedOapConfig(**SMALL, **options, learning_rate=1e-30, least_rate=0.0, weight_decay=0.0)
    monkeypatch.setattr("training.methods.fedoap.stages.train_adamw", with_planted_moments)
    job = replace(run_of(data, consent=("birch",)), config=config)
    method = replace(find_method("fedoap"), build=Planted)
    monkeypatch.setattr("training.run.method", lambda name: method)
    crossed: dict[str, list[bytes]] = {"train": [], "export": []}
    phase = ["train"]
    write, answer = rounds.write_tensors, worker.Worker.answer

    def watched(path, state, facts=None, *, durable=False):
        write(path, state, facts, durable=durable)
        if "sites" not in path.relative_to(tmp_path).parts:
            crossed[phase[0]].append(path.read_bytes())

    def answered(self, task):
        name = self._plan[task.step].name if task.step is not None else "load"
        phase[0] = "export" if name == "export" else "train"
        result = answer(self, task)
        crossed[phase[0]].append(pickle.dumps(result))
        return result

    monkeypatch.setattr(rounds, "write_tensors", watched)
    monkeypatch.setattr(worker, "write_tensors", watched)
    monkeypatch.setattr(worker.Worker, "answer", answered)
    execute(job, tmp_path / "run", workers=0)
    kept = [path.read_bytes() for path in (tmp_path / "run" / "sites").rglob("memory-*.safetensors")]
    for pattern in (PATTERN, MOMENTS):
        assert (
            sum(pattern in content for content in kept) >= 3
        )  # the canaries exist, so the search can find them
        assert not any(pattern in content for content in crossed["train"])
    assert len(crossed["train"]) > 3 * 2 * 4
    # Control: the only export with consent contains the weights.
    assert sum(PATTERN in content for content in crossed["export"]) == 1
    assert not any(MOMENTS in content for content in crossed["export"])
    keys = own_of(tmp_path / "run", "aster").model["to_key.weight"]
    assert bool((keys == torch.tensor(CANARY)).all()) == (options == {"kv": "own"})


def test_fedoap_site_that_withholds_features_is_not_a_source(data, tmp_path):
    result = execute(run_of(data, egress={"cedar": ("weights",)}), tmp_path / "run", workers=0)
    assert {model.sources for model in result.publication.models} == {("own", "aster", "birch")}
    assert [model.site for model in result.publication.models] == [None, "aster", "birch", "cedar"]
    first, second = (entry for entry in result.history if entry.phase == "train")
    assert first.sites["cedar"].withheld == ("tokens", "metrics")
    entry = 2 * 4 * 32 * 4  # keys and values of 2x2 positions, 32 features, float32
    assert first.sites["aster"].sent["tokens"] == entry
    assert first.sites["aster"].received["bank"] == 0
    received = {site: second.sites[site].received["bank"] for site in ("aster", "birch", "cedar")}
    assert received == {"aster": entry, "birch": entry, "cedar": 2 * entry}
    with torch.device("meta"):
        shared, _ = split(build("fedoap", in_channels=1, width=2, heads=4).state_dict())
    assert first.sites["aster"].sent["weights"] == 4 * sum(t.numel() for t in shared.values())
    # The site's own model uses the bank of the other sites, as in training.
    cedar = result.publication.models[3]
    assert cedar.weights["bank_present"].tolist() == [True, True]


def test_fedoap_site_below_its_own_patient_minimum_is_not_a_source(data, tmp_path):
    """Every site trains on one patient with enough slices for the federation's minimum of images."""
    job = run_of(data, feature_bounds={"birch": FeatureBounds(minimum_patients=2)})
    job = replace(job, config=job.config.model_copy(update={"rounds": 1, "fine_tune_rounds": 0}))
    assert [len({case.patient for case in site.of_split("train")}) for site in job.sites()] == [1, 1, 1]
    result = execute(job, tmp_path / "run", workers=0)
    assert {model.sources for model in result.publication.models} == {("own", "aster", "cedar")}
    (round_,) = (entry for entry in result.history if entry.phase == "train")
    assert {name: site.sent["tokens"] > 0 for name, site in round_.sites.items()} == {
        "aster": True,
        "birch": False,
        "cedar": True,
    }


def test_fedoap_later_consent_exports_without_training_again(data, tmp_path):
    store = Store(tmp_path / "store")
    execute(run_of(data, consent=()), tmp_path / "run", workers=0, store=store)
    assert store.versions.names() == ["phantom", "phantom.global"]
    assert store.open("phantom").manifest.inside == {}
    again = replace(run_of(data), settings=RunConfig(seed=4, consent=("aster",)))
    later = execute(again, tmp_path / "run", workers=0, resume=True, store=store)
    assert store.versions.names() == ["phantom", "phantom.aster", "phantom.global"]
    assert set(store.open("phantom").manifest.inside) == {"aster"}
    assert [entry.phase for entry in later.history].count("train") == 2


def invoke(data: Path, root: Path, *arguments: object):
    app = typer.Typer()
    app.command()(federate)
    command = ["--method", "fedoap", "--data", data, "--out", root / "store", "--workers", 0, *arguments]
    return CliRunner().invoke(app, [str(argument) for argument in command])


def test_federate_fedoap_publishes_models_that_equal_their_graphs(data, tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"method": SMALL, "run": {"seed": 4}}))
    # Skip the overlays: they are drawn in separate processes, which take seconds to start.
    monkeypatch.setattr("training.report.write_site_pages", lambda result, folder: {})
    done = invoke(data, tmp_path, "--config", tmp_path / "tiny.yaml", "--consent", "aster,birch")
    assert done.exit_code == 0, done.output
    store = Store(tmp_path / "store")
    assert store.versions.names() == ["phantom", "phantom.aster", "phantom.birch", "phantom.global"]
    whole = store.open("phantom").manifest
    assert whole.kind == "cross-attention"
    assert whole.references() == {
        label: store.open(f"phantom.{label}").digest for label in ("global", "aster", "birch")
    }
    assert whole.lineage.details["zero_shot"] == "shared"
    image = np.random.default_rng(0).normal(size=(3, 1, 32, 32)).astype(np.float32)
    for label, absent in (("global", None), ("aster", 1), ("birch", 2)):
        artefact = store.open(f"phantom.{label}")
        manifest = artefact.manifest
        assert (manifest.part_of, manifest.sources) == ("phantom", ("own", "aster", "birch", "cedar"))
        network = build(manifest.network.name, **manifest.network.arguments)
        network.load_state_dict(from_safetensors(artefact.read("weights.safetensors")))
        session = onnxruntime.InferenceSession(
            artefact.read("graph.onnx"), providers=["CPUExecutionProvider"]
        )
        probabilities, attention = session.run(["probabilities", "attention"], {"image": image})
        with torch.no_grad():
            logits, mass = network.segment(torch.from_numpy(image))
        np.testing.assert_allclose(probabilities[:, 1:], torch.sigmoid(logits).numpy(), atol=1e-5)
        np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
        np.testing.assert_allclose(attention, mass.numpy(), atol=1e-5)
        np.testing.assert_allclose(attention.sum(1), 1, atol=1e-5)
        assert [index for index in range(4) if not attention[:, index].any()] == (
            [] if absent is None else [absent]
        )


def test_federate_fedoap_with_two_labels_exits_with_a_reason(tmp_path, data):
    task = yaml.safe_load((data / "task.yaml").read_text())
    (tmp_path / "task.yaml").write_text(yaml.safe_dump({**task, "labels": {"organ": [1], "other": [2]}}))
    refused = invoke(data, tmp_path, "--task", tmp_path / "task.yaml")
    assert refused.exit_code == 2
    assert "expected one foreground class, found 2 (organ, other)" in refused.output


def test_fedoap_site_memory_holds_one_model_after_stage_1(data, tmp_path):
    """The separate parts of stage 1 are dropped once they are combined into one model."""
    execute(run_of(data), tmp_path / "run", workers=0)
    memory = remembered(tmp_path / "run", "aster")
    assert {"/".join(name.split("/")[:2]) for name in memory.tensors} <= {
        f"own/{kept}" for kept in ("model", "bank", "moments", "best")
    }
    assert own_of(tmp_path / "run", "aster").model.keys() >= {"to_query.weight", "head.weight"}
