"""Drawn scanners: what another scanner may do to an image's intensities, at a severity that can be turned up.

A drawn scanner shades, bends the intensity curve, blurs and adds noise. Training augments with one per image.
A federation that practises (`personalization.dose`) sends a member's scans through one scanner at a time.

Legend: B images, C channels, H rows, W columns, ... one to three spatial axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from personalization.networks.capabilities import spatial_axes
from personalization.transfer import sent

# Of severity 1; each grows in proportion.
_CURVE = 0.30  # standard deviation of the logarithm of gamma
_SHADE = 0.12  # standard deviation of each coefficient of the shading's logarithm
_BLUR = 0.004  # largest standard deviation of the blur, as a share of the image's longer side
_NOISE = 0.025  # largest standard deviation of the noise, as a share of the image's range
# Cosines of at most this many half periods along a side shade an image.
_ORDER = 2


@dataclass(frozen=True)
class Scanners:
    """One drawn scanner per image: `gamma`, `blur` and `noise` [B], `shading` [B, (order + 1)^2 - 1].

    `blur` is a share of the image's longer side, `noise` of its range of intensities. `shading` of a volume
    has (order + 1)^3 - 1 numbers, of a signal `order`.
    """

    gamma: Tensor
    shading: Tensor
    blur: Tensor
    noise: Tensor

    @classmethod
    def draw(cls, severity: Tensor, generator: torch.Generator, dimensions: int = 2) -> Scanners:
        """Draw a scanner for each severity [B], at least 0; a scanner of severity 0 changes nothing.

        `dimensions` is the number of spatial axes of the images.
        """
        count = len(severity)
        gamma = torch.exp(_CURVE * severity * torch.randn(count, generator=generator))
        terms = (_ORDER + 1) ** dimensions - 1
        shading = _SHADE * severity[:, None] * torch.randn(count, terms, generator=generator)
        blur, noise = torch.rand(2, count, generator=generator) * severity
        return cls(gamma, shading, _BLUR * blur, _NOISE * noise)

    def repeated(self, count: int) -> Scanners:
        """The same single scanner for `count` images."""
        return Scanners(
            self.gamma.expand(count),
            self.shading.expand(count, -1),
            self.blur.expand(count),
            self.noise.expand(count),
        )

    def first(self, count: int) -> Scanners:
        """The scanners of the first images."""
        return Scanners(self.gamma[:count], self.shading[:count], self.blur[:count], self.noise[:count])

    def apply(self, images_BC: Tensor, generator: torch.Generator) -> Tensor:
        """The images as these scanners show them, with the mean and the deviation that each channel had.

        A normalised image stays normalised, so that only what normalisation cannot undo is left.
        """
        own, axes = self._on(images_BC.device), spatial_axes(images_BC)
        low = images_BC.amin(dim=(1, *axes), keepdim=True)
        span = (images_BC.amax(dim=(1, *axes), keepdim=True) - low).clamp(min=1e-6)
        seen = (images_BC - low) / span * own._field(images_BC.shape[2:])
        seen = seen.clamp(min=1e-6) ** _per_image(own.gamma, seen)
        seen = own._blurred(seen)
        noise = sent(torch.randn(seen.shape, generator=generator), seen.device)
        seen = seen + _per_image(own.noise, seen) * noise
        return with_moments_of(seen, images_BC)

    def _on(self, device: torch.device) -> Scanners:
        """These scanners on a device, in one copy."""
        if device == self.gamma.device:
            return self
        rows = sent(torch.cat([torch.stack([self.gamma, self.blur, self.noise], 1), self.shading], 1), device)
        return Scanners(rows[:, 0], rows[:, 3:], rows[:, 1], rows[:, 2])

    def _field(self, sides: Sequence[int]) -> Tensor:
        """The shading [B, 1, ...]: the exponential of a sum of cosines, without a constant term."""
        device = self.shading.device
        terms = torch.ones(1, 1, device=device)
        for side in sides:
            orders, places = (torch.arange(count, device=device) for count in (_ORDER + 1, side))
            waves = torch.cos(math.pi * orders[:, None] * (places + 0.5) / side)
            terms = (terms[:, None, :, None] * waves[None, :, None, :]).flatten(2).flatten(0, 1)
        logarithm: Tensor = (self.shading @ terms[1:]).reshape(-1, 1, *sides)
        return torch.exp(logarithm)

    def _blurred(self, images_BC: Tensor) -> Tensor:
        """Blurred by a Gaussian, in the frequency domain since every image has its own width."""
        sides, axes = images_BC.shape[2:], spatial_axes(images_BC)
        *others, last = sides
        device = images_BC.device
        squares = torch.fft.rfftfreq(last, device=device) ** 2
        for number, side in enumerate(reversed(others), 1):
            squares = torch.fft.fftfreq(side, device=device).reshape(-1, *(1,) * number) ** 2 + squares
        sigma = _per_image(self.blur * max(sides), images_BC)
        transfer = torch.exp(-2 * (math.pi * sigma) ** 2 * squares)
        blurred: Tensor = torch.fft.irfftn(torch.fft.rfftn(images_BC, dim=axes) * transfer, s=sides, dim=axes)
        return blurred


def augment_intensities(images_BC: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Each image through a scanner of its own, of a severity between 0 and `severity`; half stay the same."""
    drawn = torch.rand(len(images_BC), generator=generator)
    severities = severity * (2 * drawn - 1).clamp(min=0)
    return Scanners.draw(severities, generator, images_BC.ndim - 2).apply(images_BC, generator)


def _per_image(values_B: Tensor, like_BC: Tensor) -> Tensor:
    return values_B.view(-1, *(1,) * (like_BC.ndim - 1))


def with_moments_of(images_BC: Tensor, reference_BC: Tensor) -> Tensor:
    """The images with each channel's mean and deviation as in the reference."""
    axes = spatial_axes(images_BC)
    centred = images_BC - images_BC.mean(dim=axes, keepdim=True)
    scale = reference_BC.std(dim=axes, keepdim=True) / centred.std(dim=axes, keepdim=True).clamp(min=1e-6)
    return centred * scale + reference_BC.mean(dim=axes, keepdim=True)
