"""A low-frequency prompt: factors on the amplitudes of an image's lowest frequencies (VPTTA, ProSFDA).

Shading, contrast and the like are low frequencies; anatomy's edges are not. The prompt is a filter before the
network, which stays as it is.

Legend: B images, C channels, H rows, W columns, F frequencies, ... one to three spatial axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from personalization.errors import NetworkError
from personalization.networks.registry import build

# Frequencies up to this many periods along each side: a prompt of 5x5 around the constant term.
RADIUS = 2
# The waves of a volume have 500 numbers a voxel: 264 MB of this many.
MOST_PIXELS = 2**19


class Prompted(nn.Module):
    """A network with a prompt: x + sum_f (P_f - 1) x_f, where x_f is the part of x at frequency f.

    It equals multiplying the amplitudes of the Fourier transform by P, with the phases as they are. Written
    as two products with cosines and sines, it is exact, small, and runs wherever the network does. The image
    has a fixed size: `height` and `width`; of a volume, `depth` too, its first axis; of a signal, `width`.
    """

    prompt: nn.Parameter
    waves: Tensor

    def __init__(
        self,
        backbone: str,
        arguments: dict[str, object],
        height: int | None = None,
        width: int | None = None,
        depth: int | None = None,
    ) -> None:
        super().__init__()
        self.network = build(backbone, **arguments)
        self.sides = tuple(side for side in (depth, height, width) if side is not None)
        if math.prod(self.sides) > MOST_PIXELS:
            raise NetworkError(
                f"prompted: expected at most {MOST_PIXELS} pixels, since the network carries waves of them, "
                f"found {'x'.join(map(str, self.sides))}; choose a recipe without a filter"
            )
        waves = _waves(self.sides)
        self.register_buffer("waves", waves, persistent=False)
        channels = int(arguments["in_channels"])  # type: ignore[call-overload]
        self.prompt = nn.Parameter(torch.ones(channels, len(waves) // 2))

    def forward(self, image_BC: Tensor) -> Tensor:
        """The network's answer to the filtered images. Raises NetworkError for images of another size."""
        logits: Tensor = self.network(self.filtered(image_BC))
        return logits

    def filtered(self, image_BC: Tensor) -> Tensor:
        """The images [B, C, ...] with the amplitudes multiplied."""
        if tuple(image_BC.shape[2:]) != self.sides:
            raise NetworkError(
                f"prompted: expected images of {'x'.join(map(str, self.sides))}, found {list(image_BC.shape)}"
            )
        parts = image_BC.flatten(2) @ self.waves.T
        factors = torch.cat([self.prompt, self.prompt], dim=1) - 1
        return image_BC + ((factors * parts) @ self.waves).reshape(image_BC.shape)


def sizes(sides: Sequence[int]) -> dict[str, int]:
    """The arguments of `Prompted` for images with these sides, 1 to 3."""
    named = dict(zip(("width", "height", "depth"), reversed(sides), strict=False))
    return {name: named[name] for name in ("depth", "height", "width") if name in named}


def _waves(sides: Sequence[int]) -> Tensor:
    """Orthonormal cosines, then sines [2F, pixels], of half of the frequencies: the others are conjugates.

    The constant term's sine is 0.
    """
    places = torch.meshgrid(*(torch.arange(side).double() / side for side in sides), indexing="ij")
    ranges = [range(-RADIUS, RADIUS + 1)] * (len(sides) - 1) + [range(RADIUS + 1)]
    cosines, sines = [], []
    for periods in itertools.product(*ranges):
        if next((number for number in reversed(periods) if number), 0) < 0:
            continue
        turns = sum((n * place for n, place in zip(periods, places, strict=True)), torch.zeros(()))
        phase = 2 * math.pi * turns
        scale = math.sqrt((2 if any(periods) else 1) / math.prod(sides))
        cosines.append(scale * torch.cos(phase).flatten())
        sines.append(scale * torch.sin(phase).flatten())
    return torch.stack([*cosines, *sines]).float()
