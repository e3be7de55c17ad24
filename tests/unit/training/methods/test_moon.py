"""MOON: FedAvg without its term; the term against a plain loop and finite differences; what is compared."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.errors import NetworkError
from personalization.networks import build
from tests.helpers.training.classified_sites import CORNERS, labelled_data
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, phase_of, site_data
from training.algorithm import ClientResult, Memory, State
from training.choices.fedavg import FedAvgConfig
from training.errors import ConfigurationError
from training.local.schedule import task_loss
from training.local.site import SiteData
from training.methods.fedavg import FedAvg
from training.methods.moon import Moon, MoonConfig, contrast, contrastive_loss, representation
from training.state_tree import part

SMALL: dict[str, Any] = {
    "recipe": "paper",
    "width": 2,
    "batch_size": 4,
    "local_epochs": 2,
    "optimiser": "adam",
    "learning_rate": 0.01,
    "weight_decay": 0.0,
    "augment": False,
}
PLAIN = {name: value for name, value in SMALL.items() if name != "weight_decay"}
SITES = [(TASK, site_data("A", 8, 2, 0)), (CORNERS, labelled_data("A", 8, 2, 0))]


def two_rounds(algorithm: FedAvg, data: SiteData) -> tuple[State, ClientResult, ClientResult]:
    """A site's first two rounds, the second from weights that are not those that it sent."""
    server = algorithm.initial(context("initial", 0))
    w_g = part(server.tensors, "train/w_g")
    first = client_step(algorithm, context("train", 0, site="A"), {"weights": w_g}, EMPTY, data)
    sent = first.uploads["weights"]
    between = {n: (t + sent[n]) / 2 if t.is_floating_point() else t for n, t in w_g.items()}
    memory = first.memory or Memory()
    second = client_step(algorithm, context("train", 1, site="A"), {"weights": between}, memory, data)
    return between, first, second


def same(one: State, other: State) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(("task", "data"), SITES)
def test_with_mu_0_it_is_fedavg_bit_for_bit(task: Task, data: SiteData) -> None:
    _, _, plain = two_rounds(FedAvg(FedAvgConfig(**PLAIN), task), data)
    _, first, moon = two_rounds(Moon(MoonConfig(**SMALL, mu=0, projection=0), task), data)
    assert same(plain.uploads["weights"], moon.uploads["weights"])
    _, other_first, other = two_rounds(Moon(MoonConfig(**SMALL, mu=1, projection=0), task), data)
    # A site's first round has no earlier model to leave.
    assert same(first.uploads["weights"], other_first.uploads["weights"])
    assert not same(moon.uploads["weights"], other.uploads["weights"])


def features(network: nn.Module, images: torch.Tensor, task: Task, projection: int | None) -> torch.Tensor:
    """z by the layers themselves."""
    if task.kind == "segmentation":
        return network._encode(images)[1].mean(dim=(2, 3))
    x = torch.relu(network.bn1(network.conv1(images)))
    for level in range(1, 5):
        x = network.get_submodule(f"layer{level}")(x)
    x = x.mean(dim=(2, 3))
    return x if projection == 0 else network.linear[2](torch.relu(network.linear[0](x)))


@pytest.mark.parametrize(("task", "data", "projection"), [(*SITES[0], None), (*SITES[1], 0), (*SITES[1], 3)])
def test_a_round_is_that_of_a_plain_loop(task: Task, data: SiteData, projection: int | None) -> None:
    """l_con as it is printed, by logarithms and exponentials of cosines."""
    plain = {**SMALL, "optimiser": "sgd"}
    algorithm = Moon(MoonConfig(**plain, mu=2, contrast_temperature=0.7, projection=projection), task)
    w_g, first, found = two_rounds(algorithm, data)

    def loaded(state: State) -> nn.Module:
        network = build(algorithm.network.name, **algorithm.network.arguments)
        network.load_state_dict(state)
        return network.to(memory_format=torch.channels_last)

    network, near, far = loaded(w_g).train(), loaded(w_g).eval(), loaded(first.uploads["weights"]).eval()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    images, targets = torch.from_numpy(data.train.images), torch.from_numpy(data.train.targets)
    draw = context("train", 1, site="A").generator("train")

    def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))

    seen = []
    for _ in range(2):
        for chosen in torch.randperm(8, generator=draw).split(4):
            optimiser.zero_grad()
            x = images[chosen]
            with torch.no_grad():
                anchors = [features(each, x, task, projection) for each in (near, far)]
            # Batch norm's running statistics move once per batch.
            held = copy.deepcopy(dict(network.named_buffers()))
            z = features(network, x, task, projection)
            for name, buffer in network.named_buffers():
                buffer.data.copy_(held[name])
            likes = [torch.exp(cosine(z, anchor) / 0.7) for anchor in anchors]
            l_con = -torch.log(likes[0] / (likes[0] + likes[1])).mean()
            seen.append(l_con.item())
            (task_loss(network(x), targets[chosen].long()) + 2 * l_con).backward()
            optimiser.step()
    expected = network.state_dict()
    for name, tensor in found.uploads["weights"].items():
        torch.testing.assert_close(tensor, expected[name], rtol=2e-3, atol=2e-4, msg=name)
    assert min(seen) > 0.01


def test_the_terms_gradient_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    arguments = {"in_channels": 1, "classes": 2, "width": 1}
    nets = [build("resnet18", **arguments).double().eval() for _ in range(3)]
    images = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    with contrast(*nets, "linear", mu=0.8, temperature=0.5) as term:

        def value() -> torch.Tensor:
            nets[0](images)
            return term()

        value().backward()
        step = 1e-5
        for weight in (nets[0].conv1.weight, nets[0].layer4[1].bn2.bias):
            flat, grads = weight.detach().view(-1), weight.grad.view(-1)
            for index in (0, len(flat) - 1):
                there, found = flat[index].item(), []
                for moved in (there + step, there - step):
                    flat[index] = moved
                    found.append(value().item())
                flat[index] = there
                assert grads[index].item() == pytest.approx(
                    (found[0] - found[1]) / (2 * step), rel=1e-4, abs=1e-8
                )
    assert all(weight.grad is None for each in nets[1:] for weight in each.parameters())
    assert nets[0].linear.weight.grad is None


def test_the_loss_on_a_hand_computed_case() -> None:
    """Cosines 1 and 0 with t 0.5: log(1 + exp(-2)); and 0.6 and 0.8: log(1 + exp(0.4))."""
    z, near = torch.tensor([[2.0, 0.0], [3.0, 4.0]]), torch.tensor([[5.0, 0.0], [1.0, 0.0]])
    far = torch.tensor([[0.0, 1.0], [0.0, 7.0]])
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(0.4))) / 2
    assert contrastive_loss(z, near, far, 0.5).item() == pytest.approx(expected, rel=1e-6)


def test_a_volumes_features_are_pooled_over_all_of_its_axes() -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 1), nn.Conv3d(2, 1, 1))
    images = torch.randn(3, 1, 2, 4, 5)
    with representation(network, "1") as seen:
        network(images)
    assert seen[0] is images
    torch.testing.assert_close(seen[1], network[0](images).mean(dim=(2, 3, 4)))
    assert not network._forward_pre_hooks
    assert not network[1]._forward_pre_hooks


def test_the_site_keeps_its_model_and_sends_what_fedavg_sends() -> None:
    task, data = SITES[0]
    moon, plain = Moon(MoonConfig(**SMALL), task), FedAvg(FedAvgConfig(**PLAIN), task)
    for name in ("train", "validate", "test"):
        found, expected = phase_of(moon, name), phase_of(plain, name)
        assert [g.name for g in found.uploads] == [g.name for g in expected.uploads]
        assert [g.name for g in found.downloads] == [g.name for g in expected.downloads]
    _, first, _ = two_rounds(moon, data)
    assert first.uploads.keys() == {"weights", "scores"}
    assert same(part(first.memory.tensors, "previous/model"), first.uploads["weights"])


def test_a_classifier_gets_the_papers_projection_and_a_segmentation_none() -> None:
    assert Moon(MoonConfig(width=2), TASK).network.name == "unet"
    assert Moon(MoonConfig(width=2, projection=0), CORNERS).network.name == "resnet18"
    found = Moon(MoonConfig(width=2), CORNERS).network
    assert found == NetworkSpec(
        name="projected",
        arguments={
            "network": "resnet18",
            "arguments": {"in_channels": 1, "classes": 2, "width": 2},
            "projection": 256,
        },
    )
    head = build(found.name, **found.arguments).linear
    assert [(m.in_features, m.out_features) for m in head if isinstance(m, nn.Linear)] == [
        *((16, 16), (16, 256), (256, 2))
    ]


def test_a_projection_that_does_not_fit_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match=r"projection: expected 0 of a segmentation, found 8"):
        Moon(MoonConfig(projection=8), TASK)
    with pytest.raises(NetworkError, match=r"expected a network with a linear output layer .* Conv2d and 4"):
        build("projected", network="unet", arguments={"in_channels": 1, "classes": 2}, projection=4)
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        MoonConfig(mu=-1)


def test_recipe_paper_has_the_papers_schedule() -> None:
    schedule = Moon(MoonConfig(recipe="paper", projection=0), CORNERS).schedule(5)
    assert (schedule.optimiser, schedule.momentum, schedule.weight_decay) == ("sgd", 0.9, 1e-5)
    assert (schedule.epochs, schedule.batch_size, schedule.learning_rate) == (10, 64, 0.01)
