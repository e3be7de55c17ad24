"""The server's optimisers against torch.optim, plain loops and FedAvg."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.training.sites import EMPTY, TASK, client_step, context, server_step, site_data
from training.algorithm import RoundResult, State
from training.choices.fedavg import FedAvgConfig
from training.errors import TrainingError
from training.local.networks import network_of
from training.local.scores import evaluate
from training.methods.fedavg import FedAvg
from training.methods.registry import method
from training.state_tree import part

SMALL = {"width": 1}
ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")


def built(name: str, **fields: object) -> FedAvg:
    chosen = method(name)
    return chosen.build(chosen.config(**SMALL, **fields), TASK)


def averages(start: State, rounds: int) -> list[State]:
    """What the sites' uploads come to in each round: drawn, with counters that differ."""
    draw = torch.Generator().manual_seed(1)
    return [
        {
            name: start[name] + 0.01 * torch.randn(start[name].shape, generator=draw)
            if start[name].is_floating_point()
            else start[name] + round_ + 1
            for name in start
        }
        for round_ in range(rounds)
    ]


def run(algorithm: FedAvg, rounds: int = 3) -> tuple[list[State], list[State]]:
    """The averages that came in, and w_g after each."""
    server = algorithm.initial(context("initial", 0))
    sent = averages(part(server.tensors, "train/w_g"), rounds)
    found = [part(server.tensors, "train/w_g")]
    for round_, average in enumerate(sent):
        result = RoundResult({"weights": average}, {}, {"A": 1.0}, {})
        server = server_step(algorithm, context("train", round_, rounds), server, result)
        found.append(part(server.tensors, "train/w_g"))
    return sent, found


def test_fedavgm_is_torch_sgd_with_momentum_on_the_negated_update() -> None:
    algorithm = built("fedavgm", server_rate=0.7, server_momentum=0.8)
    sent, found = run(algorithm)
    weight = torch.nn.Parameter(found[0]["conv.weight"].clone())
    optimiser = torch.optim.SGD([weight], lr=0.7, momentum=0.8)
    for average, after in zip(sent, found[1:], strict=True):
        weight.grad = weight.detach() - average["conv.weight"]
        optimiser.step()
        torch.testing.assert_close(after["conv.weight"], weight.detach())


def test_fedavgm_without_momentum_at_rate_1_is_fedavg() -> None:
    _, found = run(built("fedavgm", server_momentum=0))
    _, expected = run(FedAvg(FedAvgConfig(**SMALL), TASK))
    for name, tensor in expected[-1].items():
        torch.testing.assert_close(found[-1][name], tensor)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_steps_are_those_of_a_loop_over_numbers(name: str) -> None:
    algorithm = built(name, server_rate=0.03, beta_1=0.6, beta_2=0.9, tau=0.005)
    sent, found = run(algorithm)
    for tensor in ("conv.weight", "encoder1.enc1_bn1.bias"):
        for index in range(found[0][tensor].numel()):
            w = found[0][tensor].flatten()[index].item()
            m, v = 0.0, 0.005**2
            for average, after in zip(sent, found[1:], strict=True):
                delta = average[tensor].flatten()[index].item() - w
                m = 0.6 * m + 0.4 * delta
                if name == "fedadagrad":
                    v += delta * delta
                elif name == "fedadam":
                    v = 0.9 * v + 0.1 * delta * delta
                else:
                    v -= 0.1 * delta * delta * math.copysign(1, v - delta * delta)
                w += 0.03 * m / (math.sqrt(v) + 0.005)
                assert after[tensor].flatten()[index].item() == pytest.approx(w, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", ["fedavgm", *ADAPTIVE])
def test_batch_norm_statistics_are_averaged(name: str) -> None:
    sent, found = run(built(name), 1)
    buffers = [n for n in sent[0] if "running" in n or "num_batches" in n]
    assert buffers
    assert all(torch.equal(found[1][n], sent[0][n]) for n in buffers)


@pytest.mark.parametrize("name", ["fedavgm", *ADAPTIVE])
def test_moments_stay_at_the_server_and_end_with_training(name: str) -> None:
    algorithm = built(name)
    server = algorithm.initial(context("initial", 0))
    average = averages(part(server.tensors, "train/w_g"), 1)[0]
    trained = server_step(
        algorithm, context("train", 0, 1), server, RoundResult({"weights": average}, {}, {"A": 1.0}, {})
    )
    assert part(trained.tensors, "server_optimiser/of")
    phase = next(step for step in algorithm.plan() if step.name == "train")
    assert phase.broadcast(trained, "A")["weights"].keys() == average.keys()
    after = server_step(algorithm, context("validate", 0, 1), trained, RoundResult({}, {}, {"A": 1.0}, {}))
    assert not part(after.tensors, "server_optimiser/of")


def test_a_site_validates_with_statistics_of_its_own_slices() -> None:
    algorithm, data = built("fedavgm"), site_data("A", 8, 4, 0)
    weights = part(algorithm.initial(context("initial", 0)).tensors, "train/w_g")
    stale = {name: t + 50 if name.endswith("running_mean") else t for name, t in weights.items()}
    found = [
        client_step(algorithm, context("validate", 0, site="A"), {"weights": sent}, EMPTY, data).uploads[
            "scores"
        ]
        for sent in (weights, stale)
    ]
    torch.testing.assert_close(found[0]["score"], found[1]["score"])
    network = network_of(algorithm.network, stale, torch.device("cpu")).train()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = 1.0
    with torch.no_grad():
        network(torch.from_numpy(data.train.images))  # one batch: the statistics of all slices
    assert found[1]["score"][0].item() == pytest.approx(evaluate(network, data.val, 2).total)


def test_without_statistics_of_any_site_the_estimate_is_refused() -> None:
    algorithm = built("fedyogi")
    server = algorithm.initial(context("initial", 0))
    with pytest.raises(TrainingError, match=r"no site sent batch-norm statistics.*let `statistics` leave"):
        server_step(algorithm, context("estimate", 0, 1), server, RoundResult({}, {}, {"A": 1.0}, {}))


def test_averaged_statistics_are_refused() -> None:
    assert method("fedadam").config(recipe="paper").statistics == "estimated"
    with pytest.raises(ValueError, match="estimated"):
        method("fedadam").config(statistics="averaged")
