from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from personalization.augmentation import Augmentation, transform


def letter_f(height: int = 40, width: int = 56) -> torch.Tensor:
    """An F: no mirror image and no rotation of it is an F."""
    image = torch.zeros(height, width)
    image[8:32, 18:23] = 1
    image[8:13, 18:38] = 1
    image[18:22, 18:31] = 1
    return image


def ones(*pairs: tuple[float, float]) -> torch.Tensor:
    return torch.tensor(pairs)


def test_transform_moves_image_and_target_alike() -> None:
    shape = letter_f()
    images = shape.expand(12, 2, -1, -1).clone()
    targets = shape.to(torch.uint8).expand(12, -1, -1).clone()
    angles, signs = Augmentation().draw(12, torch.Generator().manual_seed(3))
    moved, moved_targets = transform(images, targets, angles, signs)
    assert moved_targets.dtype == torch.uint8
    for image, target in zip(moved[:, 0], moved_targets, strict=True):
        a, b = image > 0.5, target == 1
        dice = 2 * (a & b).sum() / (a.sum() + b.sum())
        assert dice > 0.97
    distinct = {m.numpy().tobytes() for m in moved_targets}
    assert len(distinct) > 8


@pytest.mark.parametrize("degrees", [-15.0, 7.0, 30.0])
def test_rotation_of_a_non_square_image_equals_scipy(degrees: float) -> None:
    shape = letter_f()
    moved, _ = transform(
        shape[None, None],
        shape[None].to(torch.uint8),
        torch.tensor([math.radians(degrees)]),
        torch.ones(1, 2),
    )
    expected = ndimage.rotate(shape.numpy(), degrees, reshape=False, order=1, mode="nearest")
    np.testing.assert_allclose(moved[0, 0].numpy(), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("sign", "axes"), [((1.0, 1.0), ()), ((-1.0, 1.0), (1,)), ((1.0, -1.0), (0,)), ((-1.0, -1.0), (0, 1))]
)
def test_flip_moves_pixels_exactly(sign: tuple[float, float], axes: tuple[int, ...]) -> None:
    shape = letter_f()
    target = shape.to(torch.uint8) * 2
    moved, moved_target = transform(shape[None, None], target[None], torch.zeros(1), ones(sign))
    torch.testing.assert_close(moved[0, 0], shape.flip(axes) if axes else shape, atol=1e-5, rtol=0)
    assert torch.equal(moved_target[0], target.flip(axes) if axes else target)


def test_rotation_pads_with_the_border_value() -> None:
    image = torch.full((1, 1, 32, 32), 7.0)
    moved, _ = transform(
        image, torch.zeros(1, 32, 32, dtype=torch.uint8), torch.tensor([0.26]), torch.ones(1, 2)
    )
    assert moved.min() > 6.999


def test_draws_stay_in_range_and_depend_only_on_the_generator() -> None:
    torch.manual_seed(0)
    first = Augmentation().draw(400, torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    again = Augmentation().draw(400, torch.Generator().manual_seed(5))
    other = Augmentation().draw(400, torch.Generator().manual_seed(6))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    limit = math.radians(15)
    assert first[0].abs().max() <= limit
    assert first[0].max() > 0.9 * limit
    assert first[0].min() < -0.9 * limit
    assert set(first[1].flatten().tolist()) == {-1.0, 1.0}
    assert set(Augmentation(flip=False).draw(50, torch.Generator())[1].flatten().tolist()) == {1.0}
