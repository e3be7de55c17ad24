"""The second view of an image that consistency compares with the first.

Every draw comes from the caller's generator. Legend: B batch, C channels, H and W height and width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def add_noise(images_BCHW: Tensor, generator: torch.Generator, std: float = 0.5) -> Tensor:
    """x + epsilon, epsilon ~ N(0, std^2) in units of each image's own standard deviation (1.4, item 8)."""
    spread = images_BCHW.std(dim=(1, 2, 3), correction=0, keepdim=True)
    noise = torch.randn(images_BCHW.shape, generator=generator, dtype=images_BCHW.dtype)
    return images_BCHW + std * spread * noise.to(images_BCHW.device)


@dataclass(frozen=True)
class RotFlip:
    """Whether each image is flipped top to bottom, and by how many quarter turns it is then rotated."""

    flips: tuple[bool, ...]
    turns: tuple[int, ...]

    @classmethod
    def draw(cls, images_BCHW: Tensor, generator: torch.Generator) -> RotFlip:
        """Flip with probability 1/2; 0 to 3 quarter turns, or none where a turn would change the shape."""
        count, _, height, width = images_BCHW.shape
        flips = torch.randint(2, (count,), generator=generator)
        turns = torch.randint(4 if height == width else 1, (count,), generator=generator)
        return cls(tuple(bool(flip) for flip in flips), tuple(int(turn) for turn in turns))

    def apply(self, images_BCHW: Tensor) -> Tensor:
        """The images, flipped and then rotated."""
        return torch.stack(
            [
                torch.rot90(image.flip(1) if flip else image, turn, dims=(1, 2))
                for image, flip, turn in zip(images_BCHW, self.flips, self.turns, strict=True)
            ]
        )

    def undo(self, images_BCHW: Tensor) -> Tensor:
        """The inverse of `apply`, for predictions [B, K, H, W] of the images it made."""
        return torch.stack(
            [
                image.flip(1) if flip else image
                for image, flip in zip(
                    (
                        torch.rot90(image, -turn, dims=(1, 2))
                        for image, turn in zip(images_BCHW, self.turns, strict=True)
                    ),
                    self.flips,
                    strict=True,
                )
            ]
        )
