from __future__ import annotations

import math

import pytest
import torch

from personalization.errors import LabelError
from personalization.fedoap.losses import binary_loss, perturbed_boundary_loss, second_stage_loss


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def by_hand(logits: list[list[float]], targets: list[list[int]]) -> float:
    losses = []
    for zs, gs in zip(logits, targets, strict=True):
        ps = [sigmoid(z) for z in zs]
        bce = -sum(math.log(p if g else 1 - p) for p, g in zip(ps, gs, strict=True)) / len(zs)
        dice = 1 - (2 * sum(p * g for p, g in zip(ps, gs, strict=True)) + 1) / (sum(ps) + sum(gs) + 1)
        losses.append(0.5 * bce + dice)
    return sum(losses) / len(losses)


LOGITS = [[2.0, -3.0, 0.5, -1.2], [-4.0, 1.1, -0.2, 3.0]]
TARGETS = [[1, 1, 0, 0], [0, 0, 0, 0]]
NOISE = [[0.3, 0.7, -0.4, 0.2], [0.1, -0.6, 0.5, -0.9]]
# |y - p|: 0.12 0.95 0.62 0.23 | 0.02 0.75+ 0.45 0.95
PERTURBED = [[2.0, -3.0 + 0.7, 0.5, -1.2], [-4.0, 1.1 - 0.6, -0.2, 3.0 - 0.9]]


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, noise = (torch.tensor(x, dtype=torch.float64).reshape(2, 1, 2, 2) for x in (LOGITS, NOISE))
    return logits.requires_grad_(), torch.tensor(TARGETS, dtype=torch.uint8).reshape(2, 2, 2), noise


def test_binary_loss_matches_the_hand_computed_value():
    logits, targets, _ = tensors()
    assert binary_loss(logits, targets).item() == pytest.approx(by_hand(LOGITS, TARGETS), rel=1e-9)


def test_losses_of_a_correct_empty_mask_are_zero():
    logits, targets = torch.full((2, 1, 4, 4), -30.0), torch.zeros(2, 4, 4, dtype=torch.uint8)
    assert binary_loss(logits, targets).item() == pytest.approx(0, abs=1e-6)
    assert perturbed_boundary_loss(logits, targets, torch.ones_like(logits)).item() == pytest.approx(
        0, abs=1e-6
    )


def test_perturbed_boundary_loss_matches_the_hand_computed_value():
    logits, targets, noise = tensors()
    assert 0.75 < sigmoid(1.1) < 0.7503  # just above the threshold
    loss = perturbed_boundary_loss(logits, targets, noise)
    expected = 0.9 * by_hand(LOGITS, TARGETS) + 0.1 * by_hand(PERTURBED, TARGETS)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    other = perturbed_boundary_loss(logits, targets, noise, threshold=0.9, trade_off=0.5)
    fewer = [PERTURBED[0], [-4.0, 1.1, -0.2, 3.0 - 0.9]]
    assert other.item() == pytest.approx(
        0.5 * by_hand(LOGITS, TARGETS) + 0.5 * by_hand(fewer, TARGETS), rel=1e-9
    )


def test_perturbed_boundary_loss_gradient_treats_the_perturbation_as_constant():
    """With delta detached, the gradient equals that of the loss at fixed perturbed pixels."""
    logits, targets, noise = tensors()
    (found,) = torch.autograd.grad(perturbed_boundary_loss(logits, targets, noise, trade_off=1.0), logits)
    moved = torch.tensor(PERTURBED, dtype=torch.float64).reshape(2, 1, 2, 2).requires_grad_()
    (expected,) = torch.autograd.grad(binary_loss(moved, targets), moved)
    torch.testing.assert_close(found, expected)


def test_perturbed_boundary_loss_without_noise_or_trade_off_is_binary_loss():
    logits, targets, noise = tensors()
    plain = binary_loss(logits, targets)
    torch.testing.assert_close(perturbed_boundary_loss(logits, targets, torch.zeros_like(noise)), plain)
    torch.testing.assert_close(perturbed_boundary_loss(logits, targets, noise, trade_off=0.0), plain)


def test_second_stage_loss_draws_noise_only_when_perturbed():
    logits, targets, _ = tensors()
    draw = torch.Generator().manual_seed(5)
    noise = torch.randn(2, 1, 2, 2, generator=torch.Generator().manual_seed(5))
    options = {"threshold": 0.5, "trade_off": 0.4}
    before = draw.get_state()
    plain = second_stage_loss(logits, targets, draw, perturbed=False, variance=4.0, **options)
    assert torch.equal(plain, binary_loss(logits, targets))
    assert torch.equal(draw.get_state(), before)
    found = second_stage_loss(logits, targets, draw, variance=4.0, **options)
    expected = perturbed_boundary_loss(logits, targets, 2 * noise.double(), **options)
    assert torch.equal(found, expected)
    # The generator advances, so another batch gets other noise.
    assert not torch.equal(second_stage_loss(logits, targets, draw, variance=4.0, **options), found)


@pytest.mark.parametrize(
    ("logits", "targets", "said"),
    [
        (torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4), "expected logits"),
        (torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4), "expected logits"),
        (torch.zeros(1, 1, 4, 4), torch.full((1, 4, 4), 2), "expected 0 and 1"),
    ],
)
def test_binary_loss_rejects_wrong_shapes_and_targets(logits, targets, said):
    with pytest.raises(LabelError, match=said):
        binary_loss(logits, targets)
