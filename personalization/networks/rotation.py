"""Predicting quarter turns: the task of test-time training (Sun et al., ICML 2020).

A head on a network's deepest features tells by which of four quarter turns an image was turned. Nothing has
to be labelled for that, so that an encoder can learn it from any image. A volume is turned in the plane of
its last two axes.

Legend: B images of a batch, C channels, F features, H and W the last two axes, of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from personalization.errors import NetworkError
from personalization.networks.capabilities import spatial_axes

TURNS = 4
# The largest shift of a view, as a share of the side: 4 pixels of 32 in the authors' code.
SHIFT = 1 / 8


@runtime_checkable
class TellsTurns(Protocol):
    """A network that has such a head."""

    def turns(self, image_BC: Tensor) -> Tensor:
        """Logits [B, 4] of the quarter turn of each image. Raises NetworkError without the head."""


def required_turns(network: nn.Module, use: str) -> TellsTurns:
    """The network, which has a trained head. `use` names what needs it. Raises NetworkError for another."""
    if not isinstance(network, TellsTurns) or getattr(network, "rotation", None) is None:
        raise NetworkError(
            f"{use}: expected a network with a head that predicts quarter turns, found "
            f"{type(network).__name__} without one; train the federation with --rotation-head, or choose "
            "another preset"
        )
    return network


def check_square(sides: Sequence[int]) -> None:
    """Raise NetworkError for images that cannot be turned by a quarter."""
    if len(sides) < 2 or sides[-1] != sides[-2]:
        raise NetworkError(
            "quarter turns: expected images with as many rows as columns, found "
            f"{'x'.join(map(str, sides))}; set such a `size` in the task"
        )


def turned(images_BC: Tensor, turns_B: Tensor) -> Tensor:
    """The images, each turned by so many quarters."""
    quarters = zip(images_BC, turns_B.tolist(), strict=True)
    return torch.stack([image.rot90(turns, (-2, -1)) for image, turns in quarters])


def views(images_BC: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to an eighth of its sides, and flipped left to right or not. The border is
    repeated. `generator` is one of the CPU."""
    most = [round(SHIFT * side) for side in images_BC.shape[2:]]
    borders = [width for side in reversed(most) for width in (side, side)]
    padded = functional.pad(images_BC, borders, mode="replicate")
    seen = []
    for image in padded:
        for axis, (side, width) in enumerate(zip(images_BC.shape[2:], most, strict=True), 1):
            first = int(torch.randint(2 * width + 1, (), generator=generator))
            image = image.narrow(axis, first, side)
        seen.append(image.flip(-1) if int(torch.randint(2, (), generator=generator)) else image)
    return torch.stack(seen)


def rotation_loss(network: TellsTurns, images_BC: Tensor, generator: torch.Generator) -> Tensor:
    """Cross-entropy of the turns of views of the images, each turned at random."""
    seen = views(images_BC, generator)
    quarters = torch.randint(TURNS, (len(seen),), generator=generator)
    return functional.cross_entropy(network.turns(turned(seen, quarters)), quarters.to(seen.device))


def every_turn_loss(network: TellsTurns, images_BC: Tensor) -> Tensor:
    """Cross-entropy of all four turns of the images as they are."""
    quarters = torch.arange(TURNS).repeat_interleave(len(images_BC))
    images = turned(images_BC.repeat(TURNS, *(1 for _ in images_BC.shape[1:])), quarters)
    return functional.cross_entropy(network.turns(images), quarters.to(images.device))


class RotationHead(nn.Module):
    """Mean over the image, group norm, and a linear layer to the four turns.

    IOP-FL's published U-Net has this head with batch norm, unused. The authors of test-time training have
    group norm of 8 groups, which does not depend on the other images of a batch.
    """

    def __init__(self, features: int, groups: int = 8) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, features)
        self.fc = nn.Linear(features, TURNS)

    def forward(self, features_BF: Tensor) -> Tensor:
        """Compute logits [B, 4] from features [B, F, ...]."""
        logits: Tensor = self.fc(self.norm(features_BF.mean(dim=spatial_axes(features_BF))))
        return logits
