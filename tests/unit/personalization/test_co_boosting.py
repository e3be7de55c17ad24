"""Co-Boosting's steps on cases computed by hand and by plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from personalization.co_boosting import (
    boosted,
    diversified,
    generator_loss,
    hard_cross_entropy,
    members_logits,
    weighted,
)


def linear(seed: int) -> nn.Module:
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3).double())
    draw = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return network


MEMBERS = [linear(seed) for seed in (1, 2, 3)]
IMAGES = torch.randn(5, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
LABELS = torch.tensor([0, 1, 2, 1, 0])
W = torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_ensemble_is_a_weighted_sum_or_the_codes_mean(normalised: bool) -> None:
    expected = sum(w * member(IMAGES) for w, member in zip(W, MEMBERS, strict=True))
    found = weighted(members_logits(MEMBERS, IMAGES), W, normalised)
    torch.testing.assert_close(found, expected / (0.9 if normalised else 1))


def test_with_equal_weights_of_sum_1_both_are_the_mean() -> None:
    logits, even = members_logits(MEMBERS, IMAGES), torch.full((3,), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(weighted(logits, even), logits.mean(dim=1))
    torch.testing.assert_close(weighted(logits, even, True), logits.mean(dim=1))


def test_an_image_that_the_ensemble_is_sure_of_hardly_counts() -> None:
    logits = torch.tensor([[0.0, 0.0], [9.0, 0.0]], requires_grad=True)
    labels = torch.tensor([0, 0])
    p = 1 / (1 + math.exp(-9))
    expected = (0.5 * math.log(2) - (1 - p) * math.log(p)) / 2
    found = hard_cross_entropy(logits, labels)
    assert found.item() == pytest.approx(expected)
    # No gradient of the weight 1 - p: a half of the plain cross-entropy's for p = 0.5.
    (slope,) = torch.autograd.grad(found, logits)
    assert slope[0].tolist() == pytest.approx([-0.5 * 0.5 / 2, 0.5 * 0.5 / 2])


def test_the_generators_loss_leaves_the_student_at_temperature_3() -> None:
    teacher = members_logits(MEMBERS, IMAGES).mean(dim=1)
    student = linear(8)(IMAGES)
    apart = 0.0
    for t, s in zip(teacher.tolist(), student.tolist(), strict=True):
        p = [math.exp(v / 3) / sum(math.exp(u / 3) for u in t) for v in t]
        q = [math.exp(v / 3) / sum(math.exp(u / 3) for u in s) for v in s]
        apart += 9 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 5
    expected = hard_cross_entropy(teacher, LABELS).item() - 0.7 * apart
    assert generator_loss(teacher, student, LABELS, 0.7).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("normalised", [False, True])
def test_a_step_of_the_weights_goes_down_the_slope_that_differences_find(normalised: bool) -> None:
    logits = members_logits(MEMBERS, IMAGES).detach()

    def loss(w: torch.Tensor) -> float:
        total = 0.0
        for row, label in zip(logits, LABELS, strict=True):
            answer = sum(w[k] * row[k] for k in range(3)) / (w.sum() if normalised else 1)
            total -= float(torch.log_softmax(answer, dim=0)[label]) / 5
        return total

    found = boosted(W, logits, LABELS, 0.02, normalised)
    for k in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[k] = 1e-6
        slope = (loss(W + step) - loss(W - step)) / 2e-6
        assert abs(slope) > 1e-3
        assert found[k].item() == pytest.approx(W[k].item() - math.copysign(0.02, slope))
    assert loss(found) < loss(W)


def test_weights_stay_within_0_and_1_and_never_all_vanish() -> None:
    logits = members_logits(MEMBERS, IMAGES).detach()
    found = boosted(W, logits, LABELS, 5.0)
    assert set(found.tolist()) <= {0.0, 1.0}
    # All members are wrong alike, so that each weight would become 0.
    wrong = -20 * torch.eye(3, dtype=torch.float64)[LABELS][:, None].expand(-1, 3, -1)
    assert torch.equal(boosted(W, wrong, LABELS, 5.0), W)


def test_an_image_moves_by_the_step_per_pixel_along_the_sign() -> None:
    """A linear network's slope in closed form: sum_i u_i p_i (W_i - sum_j p_j W_j) / 4."""
    direction = 2 * torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6)) - 1
    found = diversified(MEMBERS, IMAGES, W, direction, 0.03)
    matrix = sum(w * member[1].weight for w, member in zip(W, MEMBERS, strict=True))
    bias = sum(w * member[1].bias for w, member in zip(W, MEMBERS, strict=True))
    p = torch.softmax((IMAGES.flatten(1) @ matrix.T + bias) / 4, dim=1)
    slope = (direction * p) @ matrix / 4 - (direction * p).sum(1, keepdim=True) * (p @ matrix) / 4
    torch.testing.assert_close((found - IMAGES).flatten(1), 0.03 * slope.sign().detach())
    assert not found.requires_grad
