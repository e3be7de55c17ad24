"""Random rotation and flips (IOP-FL Sec. IV: "random rotation and flip"), resampled per batch in one call.

They are drawn on the CPU and applied where the images are.

Volumes [B, C, D, H, W] are rotated and flipped in the plane of their last two axes.

Shape suffixes: B images of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from personalization.errors import NetworkError
from personalization.transfer import sent


@dataclass(frozen=True)
class Augmentation:
    """Largest rotation of images (degrees, in both directions), and whether they may be flipped."""

    rotation: float = 15.0
    flip: bool = True

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw an angle (radians) [B] and a sign per axis (x, y) [B, 2] for each image; -1 is a flip."""
        uniform = torch.rand(count, 3, generator=generator)
        angles = (2 * uniform[:, 0] - 1) * math.radians(self.rotation)
        signs = torch.ones(count, 2)
        if self.flip:
            signs[uniform[:, 1:] < 0.5] = -1.0
        return angles, signs


def transform(
    images_BCHW: Tensor, targets_BHW: Tensor, angles_B: Tensor, signs_B2: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate and flip each image and its target about the centre.

    Images are sampled bilinearly and targets (class indices, uint8) at the nearest pixel, on the same grid.
    """
    grid = _grid(images_BCHW, angles_B, signs_B2)
    targets = grid_sample(
        targets_BHW[:, None].float(), grid, mode="nearest", padding_mode="border", align_corners=False
    )
    return _sampled(images_BCHW, grid), targets[:, 0].to(targets_BHW.dtype)


def transform_images(images_BCHW: Tensor, angles_B: Tensor, signs_B2: Tensor) -> Tensor:
    """Rotate and flip images without targets."""
    return _sampled(images_BCHW, _grid(images_BCHW, angles_B, signs_B2))


def _grid(images_BCHW: Tensor, angles_B: Tensor, signs_B2: Tensor) -> Tensor:
    height, width = images_BCHW.shape[-2:]
    cos, sin = torch.cos(angles_B), torch.sin(angles_B)
    flip_x, flip_y = signs_B2.unbind(1)
    # The grid's coordinates run from -1 to 1 along both sides, so a rotation needs the ratio of the sides.
    dimensions = images_BCHW.ndim - 2
    if dimensions not in (2, 3):
        raise NetworkError(
            f"augmentation: expected images [B, C, H, W] or volumes, found {list(images_BCHW.shape)}; train "
            "with augment: false"
        )
    theta = torch.eye(dimensions, dimensions + 1).repeat(len(images_BCHW), 1, 1)
    theta[:, 0, 0], theta[:, 0, 1] = flip_x * cos, -flip_x * sin * (height / width)
    theta[:, 1, 0], theta[:, 1, 1] = flip_y * sin * (width / height), flip_y * cos
    return affine_grid(sent(theta, images_BCHW.device), list(images_BCHW.shape), align_corners=False)


def _sampled(images_BCHW: Tensor, grid: Tensor) -> Tensor:
    """Sample images. The border is repeated: zero would be the mean of a normalised image (tissue)."""
    return grid_sample(images_BCHW, grid, mode="bilinear", padding_mode="border", align_corners=False)
