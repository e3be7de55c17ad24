"""SCAFFOLD against a plain loop of the paper's algorithm, over rounds, sites and a site that is not drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_store.task import Task
from personalization.networks import build
from tests.helpers.training.classified_sites import CORNERS, labelled_data
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, result_of, server_step, site_data
from training.algorithm import RoundResult
from training.local.networks import parameter_names
from training.local.schedule import task_loss
from training.local.site import SiteData
from training.methods.scaffold import Scaffold, ScaffoldConfig
from training.state_tree import part

SMALL = {"recipe": "paper", "width": 2, "batch_size": 4, "augment": False, "statistics": "averaged"}
DRAWN = [("A", "B"), ("A",), ("A", "B")]


@pytest.mark.parametrize(
    ("task", "sites"),
    [
        (TASK, {"A": site_data("A", 8, 2, 0), "B": site_data("B", 4, 2, 5)}),
        (CORNERS, {"A": labelled_data("A", 8, 2, 0), "B": labelled_data("B", 4, 2, 5)}),
    ],
    ids=["segmentation", "classification"],
)
def test_rounds_are_those_of_a_plain_loop(task: Task, sites: dict[str, SiteData]) -> None:
    algorithm = Scaffold(ScaffoldConfig(**SMALL, rounds=3), task)
    train = next(phase for phase in algorithm.plan() if phase.name == "train")
    trained = parameter_names(algorithm.network)
    server = algorithm.initial(context("initial", 0))
    w_g = part(server.tensors, "train/w_g")
    c = {name: torch.zeros_like(w_g[name]) for name in trained}
    own = {site: dict(c) for site in sites}
    memories = dict.fromkeys(sites, EMPTY)
    weights = {site: float(len(data.train)) for site, data in sites.items()}
    described = RoundResult({}, {}, weights, {})
    server = server_step(algorithm, context("describe", 0), server, described)
    for round_, drawn in enumerate(DRAWN):
        found, uploads, changes = {}, {}, {}
        for site in drawn:
            here = context("train", round_, site=site)
            received = train.broadcast(server, site)
            found[site] = client_step(algorithm, here, received, memories[site], sites[site])
            memories[site] = found[site].memory
            data = sites[site].train
            network = build(algorithm.network.name, **algorithm.network.arguments)
            network.load_state_dict(w_g)
            network.to(memory_format=torch.channels_last).train()
            images, draw = torch.from_numpy(data.images), here.generator("train")
            targets = torch.from_numpy(data.targets).long()
            gradients = []
            for chosen in torch.randperm(len(data), generator=draw).split(4):
                network.zero_grad()
                task_loss(network(images[chosen]), targets[chosen]).backward()
                gradients.append({name: p.grad.clone() for name, p in network.named_parameters()})
                with torch.no_grad():
                    for name, p in network.named_parameters():
                        p -= 0.1 * (gradients[-1][name] - own[site][name] + c[name])
            uploads[site] = {name: t.clone() for name, t in network.state_dict().items()}
            new = {n: torch.stack([g[n] for g in gradients]).mean(dim=0) for n in trained}
            changes[site] = {name: new[name] - own[site][name] for name in trained}
            own[site] = new
        reduced = result_of(found, mean="weights", collect=("scores",))
        controls = result_of(found, mean="control_change", collect=())
        both = RoundResult({**reduced.reduced, **controls.reduced}, reduced.collected, reduced.weights, {})
        server = server_step(algorithm, context("train", round_), server, both)
        n = sum(weights[site] for site in drawn)
        w_g = {
            name: sum(uploads[site][name] * (weights[site] / n) for site in drawn)
            if tensor.is_floating_point()
            else uploads[drawn[0]][name]
            for name, tensor in w_g.items()
        }
        c = {name: c[name] + sum(weights[s] / 12 * changes[s][name] for s in drawn) for name in trained}
        for name, tensor in part(server.tensors, "train/w_g").items():
            torch.testing.assert_close(tensor, w_g[name], rtol=1e-3, atol=1e-4)
        for name, tensor in part(server.tensors, "control/variate").items():
            torch.testing.assert_close(tensor, c[name], rtol=1e-2, atol=1e-3)
    # The loop would not notice controls of zero.
    assert max(np.abs(tensor.numpy()).max() for tensor in c.values()) > 0.01


def test_adam_is_refused() -> None:
    with pytest.raises(ValueError, match="sgd"):
        ScaffoldConfig(optimiser="adam")
