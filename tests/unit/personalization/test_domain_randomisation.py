"""Domain randomisation against naive loops, one image and one pixel at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from personalization.domain_randomisation import (
    Randomisation,
    random_convolutions,
    randomise,
    randomise_half,
)

NOTHING = Randomisation(severity=0.0, convolutions=0.0, inversion=0.0, low_resolution=0.0)
SHAPES = [(3, 1, 20), (3, 2, 9, 12), (2, 1, 5, 8, 6)]


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 1


def draw(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def standardised(image_C: Tensor) -> Tensor:
    """Each channel with mean 0 and deviation 1."""
    flat = image_C.flatten(1)
    return ((flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)).reshape(image_C.shape)


def naive_layer(image_C: Tensor, weights: Tensor, shifts: Tensor) -> Tensor:
    """A convolution with zeros around the image, pixel by pixel."""
    sides, kernel = image_C.shape[1:], weights.shape[2]
    made = torch.empty(len(weights), *sides, dtype=torch.float64)
    for feature, place in itertools.product(range(len(weights)), itertools.product(*map(range, sides))):
        total = float(shifts[feature])
        for offset in itertools.product(range(kernel), repeat=len(sides)):
            there = [p + o - kernel // 2 for p, o in zip(place, offset, strict=True)]
            if all(0 <= p < side for p, side in zip(there, sides, strict=True)):
                for channel in range(len(image_C)):
                    total += float(weights[(feature, channel, *offset)] * image_C[(channel, *there)])
        made[(feature, *place)] = total
    return made


@pytest.mark.parametrize("shape", SHAPES)
def test_random_convolutions_equal_a_naive_network_per_image(shape: tuple[int, ...]) -> None:
    batch, kernels = images(*shape), set()
    for seed in (1, 2):
        seen, again = random_convolutions(batch, draw(seed)), draw(seed)
        count, channels, dimensions = shape[0], shape[1], len(shape) - 2
        layers = []
        for inner, outer in ((channels, 2), (2, 2), (2, 2), (2, channels)):
            kernel = (1, 3)[int(torch.randint(2, (), generator=again))]
            kernels.add(kernel)
            weights = torch.randn(count * outer, inner, *(kernel,) * dimensions, generator=again)
            layers.append((weights, torch.randn(count * outer, generator=again), outer))
        shares = torch.rand(count, generator=again)
        for index, image in enumerate(batch):
            made = image.double()
            for number, (weights, shifts, outer) in enumerate(layers):
                own = slice(index * outer, (index + 1) * outer)
                made = naive_layer(made, weights[own], shifts[own])
                if number < 3:
                    made = torch.where(made < 0, 0.01 * made, made)
            share = float(shares[index])
            # The share is of what has one mean and deviation.
            mixed = share * standardised(made) + (1 - share) * standardised(image.double())
            torch.testing.assert_close(
                standardised(seen[index].double()), standardised(mixed), rtol=1e-3, atol=1e-3
            )
    assert kernels == {1, 3}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_image_changes_and_keeps_its_channels_mean_and_deviation(shape: tuple[int, ...]) -> None:
    batch = images(*shape)
    seen = randomise(batch, draw(), Randomisation(convolutions=1.0, inversion=0.5, low_resolution=0.5))
    assert seen.shape == batch.shape
    assert all(not torch.allclose(one, image, atol=0.1) for one, image in zip(seen, batch, strict=True))
    torch.testing.assert_close(seen.flatten(2).mean(2), batch.flatten(2).mean(2), rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(seen.flatten(2).std(2), batch.flatten(2).std(2), rtol=1e-3, atol=2e-3)


def test_without_any_change_images_stay() -> None:
    batch = images(3, 1, 8, 8)
    torch.testing.assert_close(randomise(batch, draw(), NOTHING), batch, rtol=0, atol=1e-3)


def test_inversion_mirrors_each_channel_at_its_mean() -> None:
    batch = images(2, 2, 8, 8)
    seen = randomise(batch, draw(), Randomisation(0.0, 0.0, inversion=1.0, low_resolution=0.0))
    torch.testing.assert_close(seen, 2 * batch.mean((2, 3), keepdim=True) - batch, rtol=0, atol=1e-3)


def test_low_resolution_takes_the_finest_stripes_and_leaves_a_slope() -> None:
    stripes = torch.tensor([1.0, -1.0]).repeat(16).expand(1, 1, 32, 32)
    slope = torch.linspace(-3, 3, 32).expand(1, 1, 32, 32)
    lost = randomise(stripes + slope, draw(), Randomisation(0.0, 0.0, 0.0, low_resolution=1.0))
    left = lost[..., 1:] - lost[..., :-1]
    assert left.abs().max() < 1.5  # 2 between neighbours before
    kept = randomise(slope, draw(), Randomisation(0.0, 0.0, 0.0, low_resolution=1.0))
    torch.testing.assert_close(kept[..., 2:-2], slope[..., 2:-2], rtol=0, atol=0.15)


def test_half_of_the_batches_stay_as_they_are_and_draws_repeat() -> None:
    batch, changed, once, twice = images(2, 1, 8, 8), 0, draw(), draw()
    for _ in range(200):
        seen, randomised = randomise_half(batch, once)
        again, also = randomise_half(batch, twice)
        assert torch.equal(seen, again)
        assert randomised == also == (not torch.equal(seen, batch))
        changed += randomised
    assert 75 < changed < 125


def test_shares_are_of_the_images() -> None:
    batch = images(400, 1, 6, 6)
    seen = randomise(batch, draw(), Randomisation(0.0, convolutions=0.3, inversion=0.0, low_resolution=0.0))
    same = ((seen - batch).abs().amax((1, 2, 3)) < 1e-2).float().mean()
    assert 0.6 < same < 0.8
