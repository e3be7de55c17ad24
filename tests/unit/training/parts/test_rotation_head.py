"""The rotation head: that it learns, what it costs the run's identity, and a round against a plain loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from model_store.task import Task
from personalization.networks import build
from personalization.networks.rotation import every_turn_loss, turned, views
from tests.helpers.training.classified_sites import CORNERS
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, site_data
from training.choices.fedavg import FedAvgConfig, RotationHeadConfig
from training.errors import ConfigurationError
from training.local.loop import train_locally
from training.local.networks import network_of
from training.local.schedule import Schedule, task_loss
from training.methods.fedavg import FedAvg
from training.methods.fedprox import FedProxConfig
from training.methods.iop_fl import IopFl, IopFlConfig
from training.parts.rotation import rotation_term, together
from training.state_tree import part

SMALL = {"recipe": "paper", "width": 2, "batch_size": 4, "augment": False, "rotation_head": True}
DATA = site_data("A", 8, 2, 0)


def test_a_round_is_that_of_a_plain_loop() -> None:
    """The task's loss and the turns' at equal weights; running statistics are those of the batch alone."""
    algorithm = FedAvg(RotationHeadConfig(**SMALL, learning_rate=0.01), TASK)
    start = part(algorithm.initial(context("initial", 0)).tensors, "train/w_g")
    here = context("train", 0, site="A")
    network = build(algorithm.network.name, **algorithm.network.arguments)
    network.load_state_dict(start)
    network.to(memory_format=torch.channels_last).train()
    optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
    images, targets = torch.from_numpy(DATA.train.images), torch.from_numpy(DATA.train.targets)
    order, draw = here.generator("train"), here.generator("rotation")
    for chosen in torch.randperm(8, generator=order).split(4):
        optimiser.zero_grad()
        loss = task_loss(network(images[chosen]), targets[chosen])
        kept = {name: buffer.clone() for name, buffer in network.named_buffers()}
        others = images[torch.randint(8, (4,), generator=draw)]
        seen = views(others, draw)
        quarters = torch.randint(4, (4,), generator=draw)
        loss = loss + functional.cross_entropy(network.turns(turned(seen, quarters)), quarters)
        loss.backward()
        for name, buffer in network.named_buffers():
            if "running" in name:
                buffer.copy_(kept[name])
        optimiser.step()
    found = client_step(algorithm, here, {"weights": start}, EMPTY, DATA).uploads["weights"]
    for name, tensor in network.state_dict().items():
        if "num_batches" not in name:
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


def test_the_head_learns_to_tell_turns() -> None:
    """Of images that are brighter at the top."""
    ramp = np.linspace(2, -2, 32, dtype=np.float32)[:, None]
    train = replace(DATA.train, images=DATA.train.images * 0.3 + ramp)
    algorithm = FedAvg(RotationHeadConfig(**SMALL), TASK)
    start = part(algorithm.initial(context("initial", 0)).tensors, "train/w_g")
    network = network_of(algorithm.network, start, torch.device("cpu"))
    term = rotation_term(network, train, 4, "float32", torch.Generator().manual_seed(0))
    schedule = Schedule(steps=60, batch_size=4, learning_rate=1e-2, augment=False)
    images = torch.from_numpy(train.images)
    before = every_turn_loss(network.eval(), images).item()
    train_locally(network, train, schedule, torch.Generator().manual_seed(1), term)
    assert every_turn_loss(network.eval(), images).item() < 0.5 < before


def test_without_the_head_identity_and_network_are_as_before() -> None:
    for plain, new in ((FedAvgConfig(), RotationHeadConfig()), (None, IopFlConfig())):
        assert "rotation_head" not in new.identity()
        assert plain is None or new.identity() == plain.identity()
        assert "rotation_head" not in new.network_for(TASK).arguments
    assert RotationHeadConfig(rotation_head=True).identity()["rotation_head"] is True
    assert IopFl(IopFlConfig(rotation_head=True), TASK).network.arguments["rotation_head"] is True


def test_what_cannot_have_a_head_says_so() -> None:
    with pytest.raises(ConfigurationError, match="such as unet, found 'resnet18'"):
        FedAvg(RotationHeadConfig(rotation_head=True), CORNERS)
    oblong = Task(name="oblong", labels={"disc": (1,)}, channels=1, size=(32, 48))
    with pytest.raises(ConfigurationError, match="as many rows as columns, found 32x48"):
        FedAvg(RotationHeadConfig(rotation_head=True), oblong)
    # A method that would not train it does not know it.
    with pytest.raises(ValueError, match="rotation_head"):
        FedProxConfig(rotation_head=True)


def test_penalties_are_added() -> None:
    assert together(None, None) is None
    one, two = (lambda: torch.tensor(1.0)), (lambda: torch.tensor(2.0))
    assert together(None, one) is one
    both = together(one, two)
    assert both is not None
    assert both().item() == 3
