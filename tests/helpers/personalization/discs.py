"""Bright discs on noise, and small networks trained to segment them, for tests of adaptation."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from personalization.iop_fl.space import GLOBAL, RoutingSpace
from personalization.losses import soft_dice_loss
from personalization.networks import build, initialise
from personalization.state import State, clone
from personalization.test_time.safety import SafetyLimits

# Limits that no run exceeds
UNGUARDED = SafetyLimits(agreement=0, collapse=0, explosion=1e9, room=1, divergence=1e9)


def discs(
    count: int, seed: int = 0, size: tuple[int, int] = (32, 32), contrast: float = 2.0, classes: int = 2
) -> tuple[Tensor, Tensor]:
    """Images [N, 1, H, W] of noise with a disc of each foreground class, and the truth [N, H, W].

    Class 1 is bright, class 2 dark. With contrast 0 the discs are only in the truth, not in the images.
    """
    generator = torch.Generator().manual_seed(seed)
    height, width = size
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    images = 0.5 * torch.randn(count, 1, height, width, generator=generator)
    truth = torch.zeros(count, height, width, dtype=torch.int64)
    for image, target in zip(images, truth, strict=True):
        for index in range(1, classes):
            y, x, radius = (float(v) for v in torch.rand(3, generator=generator))
            centre = (6 + y * (height - 12), 6 + x * (width - 12))
            inside = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < (4 + 2 * radius) ** 2
            image[0][inside] = contrast * (1 if index == 1 else -1)
            target[inside] = index
    return images, truth


@cache
def _trained(classes: int) -> tuple[State, ...]:
    """Three states of one network: trained, then a few steps more at each of two contrasts."""
    network = initialise(build("unet", **_arguments(classes)), torch.Generator().manual_seed(0)).train()

    def train(steps: int, contrast: float, seed: int) -> State:
        optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
        for step in range(steps):
            images, truth = discs(8, seed + step, contrast=contrast, classes=classes)
            optimiser.zero_grad()
            soft_dice_loss(network(images), truth).backward()
            optimiser.step()
        return clone(network.state_dict())

    return train(30, 2.0, 100), train(6, 1.5, 200), train(6, 3.0, 300)


def headed(plain: RoutingSpace) -> RoutingSpace:
    """The space, each model of which has the same drawn rotation head."""
    arguments = {**plain.arguments, "rotation_head": True}
    drawn = initialise(build(plain.network, **arguments), torch.Generator().manual_seed(9)).state_dict()
    states = {
        name: {**{n: t.to(next(iter(state.values()))) for n, t in drawn.items() if n not in state}, **state}
        for name, state in plain.experts.items()
    }
    return RoutingSpace.of(plain.network, arguments, states, states.pop(GLOBAL))


def space(inside: int = 2, classes: int = 2, dtype: torch.dtype = torch.float32) -> RoutingSpace:
    """A routing space over `inside` (at most 2) models and the global one; the same at every call."""
    typed = [
        {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
        for state in _trained(classes)
    ]
    return RoutingSpace.of(
        "unet", _arguments(classes), dict(zip("ab"[:inside], typed[1:], strict=False)), typed[0]
    )


def _arguments(classes: int) -> dict[str, int]:
    return {"in_channels": 1, "classes": classes, "width": 4}
