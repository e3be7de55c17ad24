"""Drawn scanners: what another scanner may do to an image's intensities, at a severity that can be turned up.

A drawn scanner shades, bends the intensity curve, blurs and adds noise. Training augments with one per image.
A federation that practises (`personalization.playbook`) sends a member's scans through one scanner at a time.

Legend: B images, C channels, H rows, W columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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

    `blur` is a share of the image's longer side, `noise` of its range of intensities.
    """

    gamma: Tensor
    shading: Tensor
    blur: Tensor
    noise: Tensor

    @classmethod
    def draw(cls, severity: Tensor, generator: torch.Generator) -> Scanners:
        """Draw a scanner for each severity [B], at least 0; a scanner of severity 0 changes nothing."""
        count = len(severity)
        gamma = torch.exp(_CURVE * severity * torch.randn(count, generator=generator))
        terms = (_ORDER + 1) ** 2 - 1
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

    def apply(self, images_BCHW: Tensor, generator: torch.Generator) -> Tensor:
        """The images as these scanners show them, with the mean and the deviation that each channel had.

        A normalised image stays normalised, so that only what normalisation cannot undo is left.
        """
        low = images_BCHW.amin(dim=(1, 2, 3), keepdim=True)
        span = (images_BCHW.amax(dim=(1, 2, 3), keepdim=True) - low).clamp(min=1e-6)
        seen = (images_BCHW - low) / span * self._field(*images_BCHW.shape[2:])
        seen = seen.clamp(min=1e-6) ** self.gamma[:, None, None, None]
        seen = self._blurred(seen)
        noise = torch.randn(seen.shape, generator=generator)
        seen = seen + self.noise[:, None, None, None] * noise
        return _with_moments_of(seen, images_BCHW)

    def _field(self, height: int, width: int) -> Tensor:
        """The shading [B, 1, H, W]: the exponential of a sum of cosines, without a constant term."""
        rows, columns = (
            torch.cos(math.pi * torch.arange(_ORDER + 1)[:, None] * (torch.arange(side) + 0.5) / side)
            for side in (height, width)
        )
        terms = (rows[:, None, :, None] * columns[None, :, None, :]).flatten(0, 1)[1:]
        logarithm: Tensor = (self.shading @ terms.flatten(1)).reshape(-1, 1, height, width)
        return torch.exp(logarithm)

    def _blurred(self, images_BCHW: Tensor) -> Tensor:
        """Blurred by a Gaussian, in the frequency domain since every image has its own width."""
        height, width = images_BCHW.shape[2:]
        rows, columns = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
        sigma = (self.blur * max(height, width))[:, None, None, None]
        transfer = torch.exp(-2 * (math.pi * sigma) ** 2 * (rows**2 + columns**2))
        blurred: Tensor = torch.fft.irfft2(torch.fft.rfft2(images_BCHW) * transfer, s=(height, width))
        return blurred


def augment_intensities(images_BCHW: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Each image through a scanner of its own, of a severity between 0 and `severity`; half stay the same."""
    drawn = torch.rand(len(images_BCHW), generator=generator)
    severities = severity * (2 * drawn - 1).clamp(min=0)
    return Scanners.draw(severities, generator).apply(images_BCHW, generator)


def _with_moments_of(images_BCHW: Tensor, reference_BCHW: Tensor) -> Tensor:
    """The images with each channel's mean and deviation as in the reference."""
    dims = (2, 3)
    centred = images_BCHW - images_BCHW.mean(dim=dims, keepdim=True)
    scale = reference_BCHW.std(dim=dims, keepdim=True) / centred.std(dim=dims, keepdim=True).clamp(min=1e-6)
    return centred * scale + reference_BCHW.mean(dim=dims, keepdim=True)
