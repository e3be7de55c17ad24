"""FedDP through the engine: bytes exchanged by consent, what is published, serves and is joined."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from model_store.store import Store
from personalization.fedoap.joining import JoiningConfig, join
from personalization.fedoap.parts import split
from personalization.labelled_slices import LabelledSlices
from personalization.networks import FedOapUNet, build
from personalization.state import from_safetensors
from tests.helpers.personalization.scored_slices import score_of
from training.config import RunConfig
from training.data.federation import load_federation
from training.errors import EgressRefused
from training.methods.feddp import FedDpConfig
from training.phantom import write_federation
from training.run import Run, execute

SMALL = {"width": 2, "heads": 4, "rounds": 2, "local_steps": 2, "batch_size": 4, "fine_tune_rounds": 1}
SITES = ("aster", "birch", "cedar")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_federation(tmp_path_factory.mktemp("phantom"), SITES, patients_per_site=3, size=32)


def run_of(data: Path, **settings: object) -> Run:
    return Run(load_federation(data), "feddp", FedDpConfig(**SMALL), RunConfig(seed=4, **settings))


def test_only_sites_that_consent_see_each_other_s_models(data: Path, tmp_path: Path) -> None:
    store, job = Store(tmp_path / "store"), run_of(data, consent=("aster", "birch"))
    result = execute(job, tmp_path / "run", workers=0, store=store)
    whole = build("fedoap", **job.algorithm().network.arguments).state_dict()
    shared, personal = (sum(4 * t.numel() for t in each.values()) for each in split(whole))
    phases = {entry.phase: entry for entry in result.history}
    for site in SITES:
        assert phases["train"].sites[site].sent["weights"] == shared
        assert phases["train"].sites[site].received == {"weights": shared}
    for name in ("collect", "calibrate"):
        assert phases[name].absent == {"cedar": f"no consent to '{name}'"}
    assert {site: entry.sent for site, entry in phases["collect"].sites.items()} == {
        site: {"members": personal} for site in ("aster", "birch")
    }
    assert {site: entry.received for site, entry in phases["calibrate"].sites.items()} == {
        site: {"weights": shared, "members": 2 * personal} for site in ("aster", "birch")
    }
    assert store.versions.names() == ["phantom", "phantom.aster", "phantom.birch", "phantom.global"]
    assert store.open("phantom").manifest.kind == "cross-attention"


def test_without_consent_it_ends_with_the_models_of_stage_1(data: Path, tmp_path: Path) -> None:
    result = execute(run_of(data), tmp_path / "run", workers=0, store=Store(tmp_path / "store"))
    phases = {entry.phase: entry for entry in result.history}
    assert not phases["collect"].sites
    assert not phases["calibrate"].sites
    assert [draft.role for draft in result.publication.models] == ["global"]


def test_a_site_that_refuses_weights_cannot_be_in_it(data: Path, tmp_path: Path) -> None:
    with pytest.raises(EgressRefused, match="site aster: phase 'train' uploads 'weights'"):
        execute(run_of(data, egress={"aster": ["statistics"]}), tmp_path / "run", workers=0)


def test_its_models_answer_as_graphs_and_a_hospital_joins_the_global_one(data: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    execute(run_of(data, consent="all"), tmp_path / "run", workers=0, store=store)
    image = np.random.default_rng(0).normal(size=(3, 1, 32, 32)).astype(np.float32)
    networks = {}
    for name in ("phantom.aster", "phantom.global"):
        artefact = store.open(name)
        network = build("fedoap", **artefact.manifest.network.arguments)
        network.load_state_dict(from_safetensors(artefact.read("weights.safetensors")))
        assert isinstance(network, FedOapUNet)
        networks[name] = network.eval()
        expected = torch.softmax(network(torch.from_numpy(image)), dim=1).detach().numpy()
        session = onnxruntime.InferenceSession(
            artefact.read("graph.onnx"), providers=["CPUExecutionProvider"]
        )
        np.testing.assert_allclose(session.run(None, {"image": image})[0], expected, atol=1e-5)
    images, targets = torch.from_numpy(image), torch.zeros(3, 32, 32, dtype=torch.uint8)
    targets[:, 8:20, 8:20] = 1
    slices = [LabelledSlices(images, targets, (name,) * 3) for name in ("one", "two")]
    config = JoiningConfig(epochs=2, batch_size=3, learning_rate=1e-2)
    found = join(networks["phantom.global"], *slices, config, score_of(slices[1]))
    assert [epoch.epoch for epoch in found.history] == [0, 1, 2]
    assert found.history[-1].loss is not None
