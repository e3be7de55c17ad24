"""The second view of an image that consistency compares with the first.

Every draw comes from the caller's generator. Legend: B batch, C channels, H and W height and width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from personalization.networks.capabilities import spatial_axes
from personalization.transfer import sent


def add_noise(images_BCHW: Tensor, generator: torch.Generator, std: float = 0.5) -> Tensor:
    """x + epsilon, epsilon ~ N(0, std^2) in units of each image's own standard deviation (1.4, item 8)."""
    spread = images_BCHW.std(dim=(1, *spatial_axes(images_BCHW)), correction=0, keepdim=True)
    noise = torch.randn(images_BCHW.shape, generator=generator, dtype=images_BCHW.dtype)
    return images_BCHW + std * spread * sent(noise, images_BCHW.device)


@dataclass(frozen=True)
class RotFlip:
    """Whether each image is flipped along its first axis, and by how many quarter turns it is then rotated.

    A volume is rotated in the plane of its last two axes, a signal not at all.
    """

    flips: tuple[bool, ...]
    turns: tuple[int, ...]

    @classmethod
    def draw(cls, images_BCHW: Tensor, generator: torch.Generator) -> RotFlip:
        """Flip with probability 1/2; 0 to 3 quarter turns, or none where a turn would change the shape."""
        count, _, *sides = images_BCHW.shape
        flips = torch.randint(2, (count,), generator=generator)
        square = len(sides) > 1 and sides[-2] == sides[-1]
        turns = torch.randint(4 if square else 1, (count,), generator=generator)
        return cls(tuple(bool(flip) for flip in flips), tuple(int(turn) for turn in turns))

    def apply(self, images_BCHW: Tensor) -> Tensor:
        """The images, flipped and then rotated."""
        return torch.stack(
            [
                _turned(image.flip(1) if flip else image, turn)
                for image, flip, turn in zip(images_BCHW, self.flips, self.turns, strict=True)
            ]
        )

    def undo(self, images_BCHW: Tensor) -> Tensor:
        """The inverse of `apply`, for predictions [B, K, H, W] of the images it made."""
        return torch.stack(
            [
                image.flip(1) if flip else image
                for image, flip in zip(
                    (_turned(image, -turn) for image, turn in zip(images_BCHW, self.turns, strict=True)),
                    self.flips,
                    strict=True,
                )
            ]
        )


def _turned(image_C: Tensor, turns: int) -> Tensor:
    """One image [C, ...], by quarter turns in the plane of its last two axes."""
    return torch.rot90(image_C, turns, dims=(image_C.ndim - 2, image_C.ndim - 1)) if turns else image_C
