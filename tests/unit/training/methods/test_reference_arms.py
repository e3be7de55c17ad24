"""Local-only and centralised: the arms that federated methods are held against."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness.federate import federate, in_memory
from model_store.task import Task
from personalization.networks import build, initialise
from tests.helpers.training.classified_sites import CORNERS, labelled_data
from tests.helpers.training.sites import TASK, client_step, context, server_stage, server_step, site_data
from training.algorithm import Phase, RoundResult
from training.choices.fedavg import FedAvgConfig
from training.engine.client import RunEnvironment
from training.engine.egress import SiteSpec, check_plan
from training.engine.tensorfile import read_tensors
from training.errors import EgressRefused
from training.local.schedule import task_loss
from training.local.site import SiteData
from training.methods.centralised import Centralised
from training.methods.local_only import LocalOnly

SMALL = {"recipe": "paper", "width": 2, "batch_size": 4, "rounds": 2, "learning_rate": 0.01, "augment": False}
CONFIG = FedAvgConfig(**SMALL)
KINDS = {
    "segmentation": (TASK, {site: site_data(site, 6, 2, seed) for seed, site in enumerate("AB")}),
    "classification": (CORNERS, {site: labelled_data(site, 6, 2, seed) for seed, site in enumerate("AB")}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_local_only_is_the_same_whoever_else_trains(kind: str, tmp_path: Path) -> None:
    task, data = KINDS[kind]
    found = {}
    for name, sites in (("both", data), ("alone", {"A": data["A"]})):
        algorithm = LocalOnly(CONFIG, task)
        outcome = federate(algorithm, in_memory(sites), RunEnvironment(0, "cpu"), tmp_path / name, {})
        publication = algorithm.publication(outcome.server)
        assert publication.kind == "personal-models"
        found[name] = {draft.site: draft.weights for draft in publication.models}
        sent = [set(entry.sent) for round_ in outcome.history for entry in round_.sites.values()]
        assert all("weights" not in groups for groups in sent)
    assert set(found["both"]) == {"A", "B"}
    for name, tensor in found["alone"]["A"].items():
        assert torch.equal(tensor, found["both"]["A"][name])
    assert any(not torch.equal(t, found["both"]["B"][name]) for name, t in found["both"]["A"].items())


def answers(data: SiteData) -> np.ndarray:
    return data.train.targets


@pytest.mark.parametrize("kind", KINDS)
def test_local_only_is_a_plain_loop_at_every_site(kind: str, tmp_path: Path) -> None:
    task, data = KINDS[kind]
    algorithm = LocalOnly(FedAvgConfig(**SMALL, selection="last"), task)
    around = RunEnvironment(0, "cpu")
    outcome = federate(algorithm, in_memory(data), around, tmp_path / "run", {})
    models = algorithm.publication(outcome.server).models
    assert [draft.site for draft in models] == ["A", "B"]
    for draft in models:
        train = data[draft.site].train
        images, targets = torch.from_numpy(train.images), torch.from_numpy(answers(data[draft.site])).long()
        network = build(algorithm.network.name, **algorithm.network.arguments)
        initialise(network, around.context("train", 0, 2, draft.site).generator("personal"))
        network.to(memory_format=torch.channels_last).train()
        for round_ in range(2):
            optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
            draw = around.context("train", round_, 2, draft.site).generator("train")
            for chosen in torch.randperm(len(images), generator=draw).split(4):
                optimiser.zero_grad()
                task_loss(network(images[chosen]), targets[chosen]).backward()
                optimiser.step()
        for name, tensor in network.state_dict().items():
            torch.testing.assert_close(draft.weights[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_centralised_is_a_plain_loop_over_the_pooled_images(kind: str, tmp_path: Path) -> None:
    task, data = KINDS[kind]
    config = FedAvgConfig(**{**SMALL, "rounds": 1})
    algorithm = Centralised(config, task)
    outcome = federate(algorithm, in_memory(data), RunEnvironment(0, "cpu"), tmp_path / "run", {})
    [draft] = algorithm.publication(outcome.server).models

    around = RunEnvironment(0, "cpu")
    start = algorithm.initial(around.context("initial", 0, 1)).tensors
    network = build(algorithm.network.name, **algorithm.network.arguments)
    network.load_state_dict({name.removeprefix("train/w_g/"): tensor for name, tensor in start.items()})
    network.to(memory_format=torch.channels_last).train()
    optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
    images = torch.from_numpy(np.concatenate([own.train.images for own in data.values()]))
    targets = torch.from_numpy(np.concatenate([answers(own) for own in data.values()]))
    order = torch.randperm(len(images), generator=around.context("train", 0, 1).generator("train"))
    for chosen in order.split(4):
        optimiser.zero_grad()
        task_loss(network(images[chosen]), targets[chosen].long()).backward()
        optimiser.step()
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(draft.weights[name], tensor, rtol=1e-4, atol=1e-5)


def test_centralised_takes_the_steps_of_all_sites_together() -> None:
    task, data = KINDS["segmentation"]
    algorithm = Centralised(CONFIG.model_copy(update={"local_steps": 3}), task)
    server = algorithm.initial(context("initial", 0))
    pool = next(step for step in algorithm.plan() if isinstance(step, Phase) and step.name == "pool")
    assert [group.kind for group in pool.uploads] == ["images"]
    sent = {
        site: client_step(algorithm, context("pool", 0, site=site), {}, server, own).uploads["images"]
        for site, own in data.items()
    }
    assert set(sent["A"]) == {"images", "answers"}
    server = server_step(
        algorithm, context("pool", 0), server, RoundResult({}, {"images": sent}, {"A": 6.0, "B": 6.0}, {})
    )
    after = server_stage(algorithm, context("train", 0, 2), server)
    batches = "train/w_g/encoder1.enc1_bn1.num_batches_tracked"
    assert int(after.tensors[batches]) - int(server.tensors[batches]) == 6


def test_a_site_that_keeps_its_images_refuses_the_run() -> None:
    sites = [SiteSpec("A", lambda: None, frozenset({"weights", "statistics"}))]
    with pytest.raises(EgressRefused, match="site A: phase 'pool' uploads 'images', of kind images"):
        check_plan(Centralised(CONFIG, TASK).plan(), sites)


@pytest.mark.parametrize("recipe", ["paper", "locum"])
def test_finished_centralised_run_leaves_no_image_in_its_folder(recipe: str, tmp_path: Path) -> None:
    task, data = KINDS["segmentation"]
    algorithm = Centralised(FedAvgConfig(**{**SMALL, "recipe": recipe}), task)
    outcome = federate(algorithm, in_memory(data), RunEnvironment(0, "cpu"), tmp_path, {})
    left = {path.name: read_tensors(path)[0] for path in tmp_path.glob("server-*.safetensors")}
    assert len(left) == 2  # of the last round, and of the one before it
    for tensors in (outcome.server.tensors, *left.values()):
        assert not [name for name in tensors if name.startswith("pool/")]


def test_a_task_of_either_kind_is_served(tmp_path: Path) -> None:
    for task, data in KINDS.values():
        assert isinstance(task, Task)
        algorithm = Centralised(CONFIG, task)
        outcome = federate(algorithm, in_memory(data), RunEnvironment(0, "cpu"), tmp_path / task.name, {})
        publication = algorithm.publication(outcome.server)
        assert publication.kind == "model"
        assert publication.details["selected_round"] == CONFIG.rounds
