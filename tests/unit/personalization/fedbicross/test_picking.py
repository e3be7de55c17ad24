"""Picking a cluster without labels: each cost on a hand-computed case, and costs that are never picked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from personalization.errors import NetworkError
from personalization.fedbicross.picking import (
    ObservedCluster,
    cheapest,
    costs,
    entropies,
    observe,
    stability,
    variation,
)
from personalization.gate.statistics import statistics_distance
from personalization.networks import build
from personalization.options.picking import CRITERIA


def observed(answers: list[list[float]], noisy: list[list[float]] | None = None) -> ObservedCluster:
    given = torch.tensor(answers, dtype=torch.float64)
    nothing = torch.zeros(len(given), 2, 1, dtype=torch.float64)
    return ObservedCluster(
        given,
        given if noisy is None else torch.tensor(noisy, dtype=torch.float64),
        nothing,
        nothing[0],
        torch.ones(1, dtype=torch.float64),
    )


def statistics(network: nn.Module, images: torch.Tensor) -> float:
    return costs("statistics", {"it": observe(network, images)})["it"]


def information(*answers: list[float]) -> float:
    return costs("information", {"it": observed(list(answers))})["it"]


class Tiny(nn.Module):
    """A batch norm of the image itself, then the channels' means as logits."""

    def __init__(self, mean: float = 0.0, variance: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)
        self.norm.running_mean = torch.full((2,), mean)
        self.norm.running_var = torch.full((2,), variance)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.norm(image).mean(dim=(2, 3))


def test_entropy_is_0_for_certain_and_1_for_even_answers() -> None:
    given = torch.tensor([[1.0, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0]], dtype=torch.float64)
    assert entropies(given).tolist() == pytest.approx([0, 1, math.log(2) / math.log(3)])


def test_information_cost_is_minus_1_for_certain_distinct_and_0_for_equal_answers() -> None:
    assert information([1, 0, 0], [0, 1, 0], [0, 0, 1]) == pytest.approx(-1)
    assert information([0, 1, 0], [0, 1, 0]) == pytest.approx(0)
    own = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1)) / math.log(2)
    assert information([0.9, 0.1], [0.1, 0.9]) == pytest.approx(own - 1)


def test_variation_is_half_the_absolute_difference() -> None:
    first = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    second = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    assert variation(first, second).tolist() == [1.0, 0.0]


def test_statistics_cost_over_all_images_equals_a_plain_loop() -> None:
    images = torch.randn(70, 2, 5, 4, generator=torch.Generator().manual_seed(1)) * 2 + 3
    network = Tiny(mean=1.0, variance=4.0)
    found = statistics(network, images)
    expected = 0.0
    for channel in range(2):
        values = images[:, channel].double().flatten()
        m, v, w = float(values.mean()), float(values.var(correction=0)) + 1e-5, 4.0 + 1e-5
        affinity = math.sqrt(2 * math.sqrt(v * w) / (v + w)) * math.exp(-((m - 1) ** 2) / (4 * (v + w)))
        expected += (1 - affinity) / 2
    assert found == pytest.approx(expected, rel=1e-6)


def test_statistics_cost_is_near_0_for_expected_images_and_high_otherwise() -> None:
    images = torch.randn(40, 2, 16, 16, generator=torch.Generator().manual_seed(2))
    near, far = (statistics(network, images) for network in (Tiny(), Tiny(mean=2.0, variance=0.25)))
    assert near < 1e-3
    assert far > 0.3


def test_observe_equals_the_eval_softmax_and_leaves_the_network_unchanged() -> None:
    network = build("resnet18", in_channels=1, classes=3, width=1)
    network.train()
    network(torch.randn(8, 1, 8, 8))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    images = torch.randn(5, 1, 12, 12)
    found = observe(network, images)
    network.eval()
    assert torch.allclose(found.answers, network(images).double().softmax(dim=1), atol=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not torch.equal(found.answers, found.noisy)
    assert torch.equal(found.noisy, observe(network, images).noisy)
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_observe_of_a_network_without_batch_norm_is_refused() -> None:
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(NetworkError, match=r"picked by statistics: .*GroupNorm; there is nothing"):
        observe(plain, torch.zeros(1, 1, 4, 4))


def test_statistics_cost_weighs_every_layer_equally() -> None:
    """Compared with the gate's distance between states, which is computed layer by layer."""
    network = build("resnet18", in_channels=1, classes=2, width=2)
    network.train()
    network(torch.randn(16, 1, 16, 16, generator=torch.Generator().manual_seed(4)))
    network.eval()
    images = 2 * torch.randn(9, 1, 16, 16, generator=torch.Generator().manual_seed(5)) + 1
    seen: dict[str, torch.Tensor] = {}

    def note(name: str) -> None:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            values = inputs[0].double().transpose(0, 1).flatten(1)
            seen[f"{name}.running_mean"], seen[f"{name}.running_var"] = (
                values.mean(dim=1),
                values.var(dim=1, correction=0),
            )

        dict(network.named_modules())[name].register_forward_pre_hook(hook)

    for name, module in network.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            note(name)
    with torch.no_grad():
        network(images)
    expected = statistics_distance({name: network.state_dict()[name] for name in seen}, seen)
    assert statistics(network, images) == pytest.approx(expected, rel=1e-5)


def test_each_criterion_picks_the_expected_model() -> None:
    """`always` gives one confident answer for every image; `right` distinguishes the images."""
    right = observed([[0.9, 0.1], [0.1, 0.9]], noisy=[[0.8, 0.2], [0.2, 0.8]])
    always = observed([[0.99, 0.01], [0.99, 0.01]])
    found = {criterion: cheapest(costs(criterion, {"a": always, "b": right})) for criterion in CRITERIA}
    assert found["information"] == "b"
    assert found["combined"] == "b"
    assert (found["entropy"], found["consistency"]) == ("a", "a")
    # Two models are equally far from their mean, so consensus cannot choose.
    assert [*costs("consensus", {"a": always, "b": right}).values()] == pytest.approx([0.245, 0.245])
    assert costs("consistency", {"b": right})["b"] == pytest.approx(0.1)


def test_cheapest_picks_the_first_of_equals_and_skips_non_finite_costs() -> None:
    assert cheapest({"1": 0.2, "2": 0.1, "3": 0.1}) == "2"
    assert cheapest({"1": math.nan, "2": 5.0, "3": -math.inf}) == "2"
    with pytest.raises(ValueError, match="no cluster"):
        cheapest({"1": math.nan})
    with pytest.raises(ValueError, match="at least one image"):
        observe(Tiny(), torch.zeros(0, 2, 8, 8))


def test_stability_is_low_when_the_pick_depends_on_one_scan() -> None:
    """Of four scans, `b` separates only the first, which has two images; `a` separates none."""
    same = [[0.5, 0.5]] * 3
    a = observed([[0.6, 0.4], [0.5, 0.5], *same])
    b = observed([[0.9, 0.1], [0.1, 0.9], *same])
    scans = torch.tensor([0, 0, 1, 2, 3])
    draws = 400
    found = stability("information", {"a": a, "b": b}, scans, torch.Generator().manual_seed(0), draws)
    # Only a draw without the first scan is a tie, which the first cluster wins: (3/4)^4 of the draws.
    assert found == pytest.approx(1 - 0.75**4, abs=4 * math.sqrt(0.32 * 0.68 / draws))
    sure = stability("information", {"a": b, "b": a}, scans, torch.Generator().manual_seed(0), 50)
    assert sure == 1.0
