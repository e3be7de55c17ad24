"""A network of volumes that only this test registers goes through the methods; one of images by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_store.manifest import NetworkSpec
from model_store.store import Store
from model_store.task import Task
from personalization.gate import consensus
from personalization.iop_fl.network import route, routed_layers
from personalization.iop_fl.space import RoutingSpace
from personalization.networks import build, registry
from tests.helpers.personalization.toy_networks import ToyNet
from tests.helpers.training.sites import EMPTY, TASK, context, result_of, slices
from training.algorithm import Memory, Phase, RoundResult
from training.choices.fedavg import FedAvgConfig
from training.data.federation import load_federation
from training.errors import ConfigurationError
from training.local.site import SiteData
from training.local.slices import Slices
from training.methods.fedavg import FedAvg
from training.methods.fedbn import FedBn
from training.methods.fedper import FedPer
from training.methods.fedprox import FedProx, FedProxConfig
from training.methods.fedrep import FedRep, FedRepConfig
from training.methods.iop_fl import IopFl, IopFlConfig
from training.phantom import write_federation
from training.run import Run, execute
from training.state_tree import part

SPEC = NetworkSpec(name="toy", arguments={"in_channels": 1, "classes": 2, "dimensions": 3})
SETTINGS = {
    "batch_size": 2,
    "rounds": 2,
    "learning_rate": 0.02,
    "local_steps": 8,
    "augment": False,
    "intensity": 1.0,
}
METHODS = {
    FedAvg: FedAvgConfig,
    FedBn: FedAvgConfig,
    FedPer: FedAvgConfig,
    FedRep: FedRepConfig,
    FedProx: FedProxConfig,
    IopFl: IopFlConfig,
}


@pytest.fixture(autouse=True)
def toy_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._NETWORKS, "toy", ToyNet)


def volumes(count: int, seed: int) -> Slices:
    """Bright balls on noise, one volume [4, 8, 8] per patient."""
    draw = np.random.default_rng(seed)
    depth, rows, columns = np.mgrid[:4, :8, :8]
    centres = draw.uniform(2, 6, (count, 2))
    targets = np.stack(
        [(depth - 2) ** 2 + (rows - y) ** 2 + (columns - x) ** 2 < 5 for y, x in centres]
    ).astype(np.uint8)
    images = (0.3 * draw.normal(size=(count, 1, 4, 8, 8)) + 2 * targets[:, None]).astype(np.float32)
    names = tuple(f"p{index}" for index in range(count))
    return Slices(images, targets, names, names, tuple(range(count)))


SITES = {
    name: SiteData(name, volumes(6, seed), volumes(3, seed + 1), slices(0, 0), None)
    for name, seed in {"A": 0, "B": 10}.items()
}


def of_volumes(method: type[FedAvg], **fields: Any) -> FedAvg:
    """The method on the toy; a task has two spatial axes so far."""

    class OfVolumes(method):
        def architecture(self, task: Task) -> NetworkSpec:
            return SPEC

    return OfVolumes(METHODS[method](**{**SETTINGS, **fields}), TASK)


def federated(algorithm: FedAvg) -> tuple[Memory, list[dict[str, float]]]:
    """The server's memory after the plan, over both sites, and the metrics of every round of site A."""
    server, memories, seen = algorithm.initial(context("initial", 0)), dict.fromkeys(SITES, EMPTY), []
    for phase in algorithm.plan():
        assert isinstance(phase, Phase)
        for round_ in range(phase.rounds):
            results = {}
            for site, data in SITES.items():
                received = phase.broadcast(server, site)
                here = context(phase.name, round_, phase.rounds, site)
                results[site] = phase.client_step(here, received, memories[site], data)
                memories[site] = results[site].memory or memories[site]
            seen.append(dict(results["A"].metrics))
            server = phase.server_step(context(phase.name, round_), server, _round(phase, results))
    return server, seen


def _round(phase: Phase, results: Any) -> RoundResult:
    """Reduced as the groups say."""
    found = RoundResult(
        {}, {}, {s: r.weight for s, r in results.items()}, {s: r.metrics for s, r in results.items()}
    )
    for group in phase.uploads:
        sent = {site: result for site, result in results.items() if group.name in result.uploads}
        if not sent:
            continue
        if group.reduction == "collect":
            found.collected[group.name] = {site: dict(r.uploads[group.name]) for site, r in sent.items()}
        else:
            reduced = result_of(sent, mean=group.name, collect=()).reduced[group.name]
            count = len(sent) if group.reduction == "sum" else 1
            found.reduced[group.name] = {n: t * count if count > 1 else t for n, t in reduced.items()}
    return found


@pytest.mark.parametrize("method", METHODS)
def test_method_trains_and_publishes_a_network_of_volumes(method: type[FedAvg]) -> None:
    algorithm = of_volumes(method)
    server, metrics = federated(algorithm)
    losses = [found["loss"] for found in metrics if "loss" in found]
    assert losses[-1] < losses[0]
    publication = algorithm.publication(server)
    assert publication.models
    for draft in publication.models:
        network = build(draft.network.name, **draft.network.arguments)
        network.load_state_dict(draft.weights)
        assert network.eval()(torch.zeros(1, 1, 4, 8, 8)).shape == (1, 2, 4, 8, 8)


def test_fedbn_keeps_the_norms_and_fedper_the_declared_head() -> None:
    own = {}
    for method in (FedBn, FedPer):
        algorithm = of_volumes(method)
        state = build(SPEC.name, **SPEC.arguments).state_dict()
        own[method] = {name.rpartition(".")[0] for name in state if algorithm.is_own(name)}
    assert own == {FedBn: {"body.1"}, FedPer: {"up", "output"}}


def test_iop_fl_models_of_volumes_are_routed_and_answer_together() -> None:
    algorithm = of_volumes(IopFl)
    server, _ = federated(algorithm)
    models = {draft.site: draft.weights for draft in algorithm.publication(server).models}
    space = RoutingSpace.of(
        SPEC.name, SPEC.arguments, {s: w for s, w in models.items() if s is not None}, models[None]
    )
    images = torch.from_numpy(SITES["A"].val.images)
    assert len(routed_layers(route(space))) == 4
    found, _ = consensus(space, images)
    truth = torch.from_numpy(SITES["A"].val.targets)
    overlap = 2 * ((found > 0) & (truth > 0)).sum() / ((found > 0).sum() + (truth > 0).sum())
    assert overlap > 0.5


def test_network_without_batch_norm_skips_the_estimate_and_fedbn_keeps_instance_norm() -> None:
    arguments = {**SPEC.arguments, "norm": "instance"}

    class Instance(FedBn):
        def architecture(self, task: Task) -> NetworkSpec:
            return NetworkSpec(name="toy", arguments=arguments)

    class Plain(FedAvg):
        architecture = Instance.architecture

    config = FedAvgConfig(**SETTINGS)
    assert [step.name for step in Plain(config, TASK).plan()] == ["describe", "train", "validate", "test"]
    assert Instance(config, TASK).is_own("body.1.weight")
    server, _ = federated(Plain(config, TASK))
    assert part(server.tensors, "train/w_g").keys() == build("toy", **arguments).state_dict().keys()


def test_fedbn_of_a_network_without_norms_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutNorm(ToyNet):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            del self.body[1]

    monkeypatch.setitem(registry._NETWORKS, "toy", WithoutNorm)
    with pytest.raises(ConfigurationError, match="no layer that normalises"):
        of_volumes(FedBn)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"network": "you-net"}, "unknown network 'you-net'; known: "),
        ({"network": "toy", "network_arguments": {"sharp": True}}, "unexpected keyword argument 'sharp'"),
        ({"network": "toy"}, "toy: expected 3 spatial axes, found 32x32"),
        ({"network": "resnet18"}, "expected a network for a segmentation, found one for a classification"),
        ({"network": "fedoap"}, "unexpected keyword argument 'classes'"),
    ],
)
def test_network_that_does_not_fit_is_refused_before_training(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FedAvg(FedAvgConfig(**fields), TASK)


def test_choice_of_a_network_is_written_down_only_where_it_is_made() -> None:
    assert not FedAvgConfig().model_dump().keys() & {"network", "network_arguments"}
    chosen = FedAvgConfig(network="toy", network_arguments={"dimensions": 2})
    dumped = chosen.model_dump(mode="json")
    assert dumped["network_arguments"] == {"dimensions": 2}
    assert FedAvgConfig(**dumped) == chosen


def test_another_network_is_trained_and_published_by_its_name(tmp_path: Path) -> None:
    federation = load_federation(write_federation(tmp_path / "data", ("aster", "birch"), 3, 16))
    config = FedAvgConfig(
        rounds=1, local_steps=1, network="toy", network_arguments={"dimensions": 2, "norm": "instance"}
    )
    run, store = Run(federation, "fedavg", config), Store(tmp_path / "store")
    result = execute(run, tmp_path / "run", workers=0, store=store, name="toy")
    manifest = result.artefacts[-1].manifest
    assert manifest.network.name == "toy"
    assert manifest.network.arguments["norm"] == "instance"
    assert manifest.lineage.details["config"]["network"] == "toy"
