"""Drawn scanners against plain formulas."""

from __future__ import annotations

import math

import torch
from scipy import ndimage

from personalization.scanner import Scanners, augment_intensities


def scanner(
    gamma: float = 1.0, blur: float = 0.0, noise: float = 0.0, shading: torch.Tensor | None = None
) -> Scanners:
    field = torch.zeros(1, 8) if shading is None else shading[None]
    return Scanners(torch.tensor([gamma]), field, torch.tensor([blur]), torch.tensor([noise]))


def images(count: int = 1, size: int = 32) -> torch.Tensor:
    return torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(0))


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def standardised(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean()) / values.std()


def test_severity_0_changes_nothing() -> None:
    batch = images(3)
    none = Scanners.draw(torch.zeros(3), draw())
    torch.testing.assert_close(none.apply(batch, draw()), batch, rtol=0, atol=1e-4)


def test_the_curve_is_a_power_of_the_brightness() -> None:
    batch = images()
    seen = scanner(gamma=2.0).apply(batch, draw())
    bright = (batch - batch.min()) / (batch.max() - batch.min())
    torch.testing.assert_close(
        standardised(seen), standardised(bright.clamp(min=1e-6) ** 2), rtol=1e-3, atol=1e-4
    )


def test_the_blur_is_gaussian_and_wraps() -> None:
    batch = images()
    seen = scanner(blur=2 / 32).apply(batch, draw())
    expected = ndimage.gaussian_filter(batch[0, 0].double().numpy(), 2.0, mode="wrap", truncate=8)
    torch.testing.assert_close(
        standardised(seen[0, 0]).double(), standardised(torch.from_numpy(expected)), rtol=0, atol=2e-3
    )


def test_the_shading_is_the_exponential_of_cosines() -> None:
    terms = torch.zeros(8)
    terms[0] = 0.5  # no half period down, one across
    bright = scanner(shading=terms).apply(torch.linspace(0, 1, 256).reshape(1, 1, 16, 16), draw())
    columns = torch.cos(math.pi * (torch.arange(16) + 0.5) / 16)
    expected = torch.linspace(0, 1, 256).reshape(16, 16) * torch.exp(0.5 * columns)
    torch.testing.assert_close(standardised(bright[0, 0]), standardised(expected), rtol=1e-3, atol=1e-4)


def test_each_channel_keeps_its_mean_and_deviation() -> None:
    batch = torch.cat([images(2) * 3 + 1, images(2) - 4], dim=1)
    seen = Scanners.draw(torch.full((2,), 3.0), draw()).apply(batch, draw())
    assert not torch.allclose(seen, batch, atol=0.1)
    torch.testing.assert_close(seen.mean(dim=(2, 3)), batch.mean(dim=(2, 3)), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(seen.std(dim=(2, 3)), batch.std(dim=(2, 3)), rtol=1e-3, atol=1e-3)


def test_augmentation_leaves_about_half_of_the_images_and_repeats_with_the_generator() -> None:
    batch = images(200, 8)
    seen = augment_intensities(batch, 2.0, draw())
    assert torch.equal(seen, augment_intensities(batch, 2.0, draw()))
    same = ((seen - batch).abs().amax(dim=(1, 2, 3)) < 1e-3).float().mean()
    assert 0.35 < same < 0.65


def test_one_scanner_for_many_images_is_the_same_for_each() -> None:
    drawn = Scanners.draw(torch.tensor([2.0]), draw())
    quiet = Scanners(drawn.gamma, drawn.shading, drawn.blur, torch.zeros(1))
    together = quiet.repeated(3).apply(images(3), draw())
    for one, image in zip(together, images(3), strict=True):
        torch.testing.assert_close(quiet.apply(image[None], draw())[0], one, rtol=1e-4, atol=1e-5)
    assert len(quiet.repeated(3).first(2).gamma) == 2
