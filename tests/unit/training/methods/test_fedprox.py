"""FedProx: FedAvg at mu = 0, and the proximal term against finite differences and a plain loop."""

from __future__ import annotations

import pytest
import torch

from model_store.task import Task
from personalization.networks import build
from tests.helpers.training.classified_sites import CORNERS, labelled_data
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, site_data
from training.choices.fedavg import FedAvgConfig
from training.local.schedule import task_loss
from training.local.site import SiteData
from training.methods.fedavg import FedAvg
from training.methods.fedprox import FedProx, FedProxConfig, proximal_term
from training.state_tree import part

SMALL = {
    "recipe": "paper",
    "width": 2,
    "batch_size": 4,
    "local_epochs": 2,
    "learning_rate": 0.01,
    "augment": False,
}
SITES = [(TASK, site_data("A", 8, 2, 0)), (CORNERS, labelled_data("A", 8, 2, 0))]


def received(algorithm: FedAvg) -> dict[str, dict[str, torch.Tensor]]:
    return {"weights": part(algorithm.initial(context("initial", 0)).tensors, "train/w_g")}


def sent(algorithm: FedAvg, data: SiteData) -> dict[str, torch.Tensor]:
    result = client_step(algorithm, context("train", 0, site="A"), received(algorithm), EMPTY, data)
    return dict(result.uploads["weights"])


@pytest.mark.parametrize(("task", "data"), SITES)
def test_with_mu_0_it_is_fedavg_bit_for_bit(task: Task, data: SiteData) -> None:
    plain = sent(FedAvg(FedAvgConfig(**SMALL), task), data)
    prox = sent(FedProx(FedProxConfig(**SMALL, mu=0), task), data)
    assert prox.keys() == plain.keys()
    assert all(prox[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in plain.items())
    moved = sent(FedProx(FedProxConfig(**SMALL, mu=1), task), data)
    assert any(not torch.equal(moved[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize(("task", "data"), SITES)
def test_a_round_is_that_of_a_plain_loop(task: Task, data: SiteData) -> None:
    """mu (w - w_g) is added to the gradient by hand, which no autograd has seen."""
    algorithm = FedProx(FedProxConfig(**SMALL, mu=0.5), task)
    start = received(algorithm)["weights"]
    network = build(algorithm.network.name, **algorithm.network.arguments)
    network.load_state_dict(start)
    network.to(memory_format=torch.channels_last).train()
    optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
    images = torch.from_numpy(data.train.images)
    targets = torch.from_numpy(data.train.targets)
    draw = context("train", 0, site="A").generator("train")
    for _ in range(2):
        for chosen in torch.randperm(8, generator=draw).split(4):
            optimiser.zero_grad()
            task_loss(network(images[chosen]), targets[chosen].long()).backward()
            with torch.no_grad():
                for name, weight in network.named_parameters():
                    weight.grad += 0.5 * (weight - start[name])
            optimiser.step()
    expected = network.state_dict()
    for name, tensor in sent(algorithm, data).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


def test_the_terms_gradient_is_that_of_finite_differences() -> None:
    """In float64, away from the anchor: central differences of mu / 2 ||w - w_g||^2 itself."""
    torch.manual_seed(0)
    network = build("resnet18", in_channels=1, classes=2, width=1).double()
    term = proximal_term(network, 0.3)
    assert term().item() == 0
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight))
    term().backward()
    step = 1e-5
    for weight in (network.conv1.weight, network.bn1.bias, network.linear.weight):
        flat = weight.detach().view(-1)
        for index in (0, len(flat) - 1):
            there = flat[index].item()
            values = []
            for moved in (there + step, there - step):
                flat[index] = moved
                values.append(term().item())
            flat[index] = there
            found = (values[0] - values[1]) / (2 * step)
            assert weight.grad.view(-1)[index].item() == pytest.approx(found, rel=1e-6, abs=1e-7)


def test_batch_norm_statistics_have_no_such_term() -> None:
    network = build("unet", in_channels=1, classes=2, width=2)
    term = proximal_term(network, 1.0)
    for name, buffer in network.named_buffers():
        buffer.add_(5)
        assert "running" in name or "num_batches" in name
    assert term().item() == 0


def test_the_term_keeps_a_site_nearer_to_the_global_model() -> None:
    task, data = SITES[0]
    distances = []
    for mu in (0, 1):
        algorithm = FedProx(FedProxConfig(**SMALL, mu=mu), task)
        start, end = received(algorithm)["weights"], sent(algorithm, data)
        parameters = dict(build("unet", **algorithm.network.arguments).named_parameters())
        distances.append(sum(float(((end[n] - start[n]) ** 2).sum()) for n in parameters))
    assert distances[1] < distances[0] / 2


def test_a_negative_mu_is_rejected() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        FedProxConfig(mu=-1)
