"""DAFL's loss on cases computed by hand and by plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from personalization.dafl import activation, generator_loss, information_entropy, one_hot
from personalization.networks.capabilities import Traits


class Small(nn.Module):
    traits = Traits("classification", head=("output",))

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body, self.output = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
        draw = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.output(torch.relu(self.body(images.flatten(1))))


def test_classes_that_come_alike_have_the_least_entropy_term() -> None:
    even = 50 * torch.eye(4)
    assert information_entropy(even).item() == pytest.approx(-math.log(4) / 4)
    assert information_entropy(even, "code").item() == pytest.approx(-math.log10(4))
    # One class alone: the others' share underflows to 0, and adds 0.
    alone = torch.tensor([[500.0, 0.0, 0.0]] * 3)
    assert information_entropy(alone).item() == pytest.approx(0, abs=1e-6)
    assert torch.isfinite(torch.autograd.grad(information_entropy(alone.requires_grad_()), alone)[0]).all()


def test_the_activation_term_is_a_norm_or_the_codes_mean() -> None:
    features = torch.tensor([[1.0, -2.0], [0.0, 3.0]])
    assert activation(features).item() == -(3 + 3) / 2
    assert activation(features, "code").item() == -6 / 4


def test_the_one_hot_term_falls_as_the_ensemble_grows_sure() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-2))) / 2
    assert one_hot(logits).item() == pytest.approx(expected)
    assert one_hot(3 * logits) < one_hot(logits)


@pytest.mark.parametrize("reading", ["paper", "code"])
def test_the_loss_of_an_ensemble_is_a_plain_loop(reading) -> None:
    members = [Small(seed) for seed in (1, 2, 3)]
    images = torch.randn(6, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    total_logits, sizes = torch.zeros(6, 3, dtype=torch.float64), 0.0
    for member in members:
        member.requires_grad_(False)
        features = torch.relu(images.flatten(1) @ member.body.weight.T + member.body.bias)
        total_logits += (features @ member.output.weight.T + member.output.bias) / 3
        per_image = [sum(abs(float(value)) for value in row) for row in features]
        sizes += sum(per_image) / 6 / 3 / (5 if reading == "code" else 1)
    probabilities = [[math.exp(v) / sum(map(math.exp, row)) for v in row] for row in total_logits.tolist()]
    mean = [sum(row[k] for row in probabilities) / 6 for k in range(3)]
    sure = -sum(math.log(max(row)) for row in probabilities) / 6
    entropy = sum(q * math.log(q) for q in mean) / 3
    if reading == "code":
        entropy = sum(q * math.log10(q) for q in mean)
    found = generator_loss(members, images, 0.2, 4.0, reading)
    assert found.total.item() == pytest.approx(sure - 0.2 * sizes + 4 * entropy, rel=1e-10)
    assert (found.one_hot.item(), found.activation.item(), found.entropy.item()) == pytest.approx(
        (sure, -sizes, entropy), rel=1e-10
    )
    torch.testing.assert_close(found.logits, total_logits)
    assert not any(member.output._forward_pre_hooks for member in members)


def test_the_gradient_reaches_the_images_through_every_term() -> None:
    members = [Small(seed) for seed in (1, 2)]
    images = torch.randn(4, 1, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: generator_loss(members, x, 0.3, 2.0).total, (images,))
    (whole,) = torch.autograd.grad(generator_loss(members, images, 0.3, 2.0).total, images)
    for a, b in ((0.0, 2.0), (0.3, 0.0)):
        (part,) = torch.autograd.grad(generator_loss(members, images, a, b).total, images)
        assert not torch.allclose(whole, part)
