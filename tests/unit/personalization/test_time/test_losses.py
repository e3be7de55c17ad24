from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from personalization.iop_fl.network import route
from personalization.test_time.losses import (
    consistency,
    entropy,
    official_entropy,
    official_shape,
    shape_distance,
    shape_range,
)
from personalization.test_time.perturb import RotFlip, add_noise
from tests.helpers.personalization.routing_cases import images, moved, space_of


def _two_classes(foreground: Tensor) -> Tensor:
    """Probabilities [B, 2, H, W] of a foreground [B, H, W]."""
    return torch.stack((1 - foreground, foreground), dim=1)


def test_consistency_by_hand_with_a_gradient_through_both_views() -> None:
    first = _two_classes(torch.tensor([[[0.2, 0.5]]])).requires_grad_()
    second = _two_classes(torch.tensor([[[0.5, 0.5]]])).requires_grad_()
    # One pixel of two differs, by 0.3 in both classes
    loss = consistency(first, second)
    assert loss.item() == pytest.approx((0.09 + 0.09) / 4)
    loss.backward()
    expected = torch.tensor([[[[2 * 0.3 / 4, 0]], [[-2 * 0.3 / 4, 0]]]])
    torch.testing.assert_close(first.grad, expected)
    torch.testing.assert_close(second.grad, -expected)


def test_entropy_by_hand() -> None:
    # H(1/4) = 0.8113 bits, H(1/2) = 1, H(0) = 0
    foreground = torch.tensor([[[0.25, 0.5], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    bits = 0.25 * math.log2(4) + 0.75 * math.log2(4 / 3)
    assert entropy(_two_classes(foreground)).item() == pytest.approx((bits + 1 + 0 + 0 + 4) / 8, abs=1e-5)
    three = torch.full((1, 3, 2, 2), 1 / 3, dtype=torch.float64)
    assert entropy(three).item() == pytest.approx(1, abs=1e-5)


def test_official_entropy_grows_with_the_batch() -> None:
    foreground = torch.tensor([0.25, 0.5, 0.0], dtype=torch.float64).reshape(3, 1, 1)
    probabilities = _two_classes(foreground)
    terms = sum(p * math.log2(1 / p) for p in (0.25, 0.75, 0.5, 0.5))
    # Summed over three images, mean over two classes
    assert official_entropy(probabilities).item() == pytest.approx(terms / 2, abs=1e-5)
    assert official_entropy(probabilities).item() == pytest.approx(3 / 2 * entropy(probabilities).item())


def test_entropies_and_shape_have_finite_gradients_when_all_is_certain() -> None:
    logits = torch.tensor([200.0, -200.0]).reshape(1, 2, 1, 1).expand(1, 2, 4, 4).clone().requires_grad_()
    probabilities = torch.softmax(logits, dim=1)
    loss = entropy(probabilities) + official_entropy(probabilities)
    (loss + shape_distance(probabilities, 1) + official_shape(probabilities)).backward()
    assert loss.item() == pytest.approx(0, abs=1e-5)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_shape_by_hand() -> None:
    # With d = 1 three of the four pixels see both a 0 and a 1, in both classes
    line = _two_classes(torch.tensor([[[0.0, 0.0, 1.0, 0.0]]], dtype=torch.float64))
    assert shape_distance(line, 1).item() == pytest.approx(2 * 3 / 4)
    assert shape_distance(line, 2).item() == pytest.approx(2)
    assert official_shape(line, 1).item() == pytest.approx(1e-6 * math.sqrt(3))
    assert official_shape(line).item() == pytest.approx(1e-6 * 2)


def test_shape_is_the_spread_of_the_window_around_each_pixel() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(2, 3, 5, 7, generator=generator, dtype=torch.float64)
    d, total = 2, 0.0
    for row in range(5):
        for column in range(7):
            top, left = max(0, row - d), max(0, column - d)
            window = probabilities[:, :, top : row + d + 1, left : column + d + 1].flatten(2)
            total += float((window.max(2).values - window.min(2).values).sum())
    assert shape_distance(probabilities, d).item() == pytest.approx(total / (2 * 5 * 7))


@pytest.mark.parametrize(("size", "d"), [((384, 384), 10), ((96, 128), 2), ((192, 160), 4), ((16, 16), 1)])
def test_range_of_the_shape_follows_the_size(size: tuple[int, int], d: int) -> None:
    assert shape_range(*size) == d


def _reference_loss(model: torch.nn.Module, x: Tensor, noise: Tensor, turned: RotFlip) -> Tensor:
    """The loss of the reference loop (dropout 0), step by step and image by image."""
    view = torch.zeros_like(x)
    for index in range(len(x)):
        image = (x + noise)[index]
        if turned.flips[index]:
            image = torch.flip(image, [1])
        view[index] = torch.rot90(image, turned.turns[index], [1, 2])
    output = torch.softmax(model(x), dim=1)
    uncertainty = 0
    for index in range(len(x)):
        uncertainty = uncertainty - output[index] * torch.log(output[index] + 1e-6) / math.log(2)
    loss_entropy = uncertainty.mean()
    back = torch.softmax(model(view), dim=1).clone()
    for index in range(len(x)):
        image = torch.rot90(back[index].clone(), 4 - turned.turns[index], [1, 2])
        back[index] = torch.flip(image, [1]) if turned.flips[index] else image
    loss_consistency = ((back - torch.softmax(model(x), dim=1)) ** 2).mean()
    foreground = output[:, 1:2]
    pool = torch.nn.MaxPool2d(kernel_size=21, stride=1, padding=10)
    edges = 1e-6 * (pool(foreground) + pool(-1 * foreground))
    return 10 * loss_entropy + 0.1 * loss_consistency + (edges**2).sum() ** 0.5


def test_official_losses_are_those_of_the_reference_loop() -> None:
    network = moved(route(space_of(2), "pooled"), by=0.2)
    x = images(5, 32, 32)
    generator = torch.Generator().manual_seed(4)
    noise = 0.5 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    turned = RotFlip((True, False, True, False, True), (0, 1, 2, 3, 3))
    expected = _reference_loss(network, x, noise, turned)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad()

    output = torch.softmax(network(x), dim=1)
    back = turned.undo(torch.softmax(network(turned.apply(x + noise)), dim=1))
    loss = 10 * official_entropy(output) + 0.1 * consistency(back, output) + official_shape(output)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)
    # The batch factor 5 / 2: without it the loss would be below 10
    assert loss.item() > 10
    for gradient, parameter in zip(gradients, network.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-9)


def test_noise_is_in_units_of_each_image() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 1, 200, 200, generator=generator, dtype=torch.float64)
    scale = torch.tensor([0.0, 1.0, 30.0], dtype=torch.float64)[:, None, None, None]
    given = 100 + scale * drawn
    before = torch.random.get_rng_state()
    noise = add_noise(given, torch.Generator().manual_seed(1)) - given
    assert torch.equal(torch.random.get_rng_state(), before)
    assert noise.std(dim=(1, 2, 3)).tolist() == pytest.approx([0, 0.5, 15], rel=0.02)
    assert noise.mean(dim=(1, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=0.3)
    torch.testing.assert_close(add_noise(given, torch.Generator().manual_seed(1), std=1.0) - given, 2 * noise)


def test_rotation_and_flip_by_hand_and_back() -> None:
    image = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).expand(3, 1, 2, 2)
    turned = RotFlip((True, False, True), (0, 1, 3))
    expected = [[[3, 4], [1, 2]], [[2, 4], [1, 3]], [[1, 3], [2, 4]]]
    assert turned.apply(image)[:, 0].tolist() == expected
    square = images(40, 16, 16)
    drawn = RotFlip.draw(square, torch.Generator().manual_seed(0))
    assert set(drawn.flips) == {True, False}
    assert set(drawn.turns) == {0, 1, 2, 3}
    assert torch.equal(drawn.undo(drawn.apply(square)), square)
    assert drawn == RotFlip.draw(square, torch.Generator().manual_seed(0))


def test_images_that_are_not_square_are_flipped_only() -> None:
    oblong = images(40, 16, 32)
    drawn = RotFlip.draw(oblong, torch.Generator().manual_seed(0))
    assert set(drawn.turns) == {0}
    assert set(drawn.flips) == {True, False}
    assert torch.equal(drawn.undo(drawn.apply(oblong)), oblong)
