"""A low-frequency prompt: factors on the amplitudes of an image's lowest frequencies (VPTTA, ProSFDA).

Shading, contrast and the like are low frequencies; anatomy's edges are not. The prompt is a filter before the
network, which stays as it is.

Legend: B images, C channels, H rows, W columns, F frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from personalization.errors import NetworkError
from personalization.networks.registry import build, register

# Frequencies up to this many periods along each side: a prompt of 5x5 around the constant term.
RADIUS = 2


@register("prompted")
class Prompted(nn.Module):
    """A network with a prompt: x + sum_f (P_f - 1) x_f, where x_f is the part of x at frequency f.

    It equals multiplying the amplitudes of the Fourier transform by P, with the phases as they are. Written
    as two products with cosines and sines, it is exact, small, and runs wherever the network does. The image
    has a fixed size.
    """

    prompt: nn.Parameter
    waves: Tensor

    def __init__(self, backbone: str, arguments: dict[str, object], height: int, width: int) -> None:
        super().__init__()
        self.network = build(backbone, **arguments)
        self.height, self.width = height, width
        waves = _waves(height, width)
        self.register_buffer("waves", waves, persistent=False)
        channels = int(arguments["in_channels"])  # type: ignore[call-overload]
        self.prompt = nn.Parameter(torch.ones(channels, len(waves) // 2))

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """The network's answer to the filtered images. Raises NetworkError for images of another size."""
        logits: Tensor = self.network(self.filtered(image_BCHW))
        return logits

    def filtered(self, image_BCHW: Tensor) -> Tensor:
        """The images with the amplitudes multiplied."""
        if tuple(image_BCHW.shape[2:]) != (self.height, self.width):
            raise NetworkError(
                f"prompted: expected images of {self.height}x{self.width}, found {list(image_BCHW.shape)}"
            )
        parts = image_BCHW.flatten(2) @ self.waves.T
        factors = torch.cat([self.prompt, self.prompt], dim=1) - 1
        return image_BCHW + ((factors * parts) @ self.waves).reshape(image_BCHW.shape)


def _waves(height: int, width: int) -> Tensor:
    """Orthonormal cosines, then sines [2F, H W], of half of the frequencies: the others are their conjugates.

    The constant term's sine is 0.
    """
    rows, columns = torch.arange(height).double() / height, torch.arange(width).double() / width
    cosines, sines = [], []
    for down in range(-RADIUS, RADIUS + 1):
        for right in range(RADIUS + 1):
            if right == 0 and down < 0:
                continue
            phase = 2 * math.pi * (down * rows[:, None] + right * columns[None])
            scale = math.sqrt((1 if down == right == 0 else 2) / (height * width))
            cosines.append(scale * torch.cos(phase).flatten())
            sines.append(scale * torch.sin(phase).flatten())
    return torch.stack([*cosines, *sines]).float()
