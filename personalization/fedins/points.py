"""Where a frozen network is scaled and shifted (SSF, Lian et al., 2022), for each image of a batch by itself.

Legend: B batch, C channels, D all channels of all insertion points, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from personalization.errors import NetworkError
from personalization.networks import Backbone


@dataclass(frozen=True)
class Point:
    """A module, by its path, and how many channels its output has."""

    path: str
    channels: int


def points_of(backbone: Backbone) -> tuple[Point, ...]:
    """The insertion points of a network, in the order they run."""
    return tuple(Point(path, _channels(backbone.get_submodule(path))) for path in backbone.ssf_paths)


@contextmanager
def adapted(
    backbone: Backbone, points: Sequence[Point], scale_BD: Tensor, shift_BD: Tensor
) -> Iterator[Backbone]:
    """Within the block, the output x of every point is `x * scale + shift`, along its channels.

    Each image has its own: [B, 1, C] on tokens, [B, C, 1, 1] on maps. B may be 1: the same for all images.
    Gradients flow into scale and shift. Not for two threads at once on one network.
    """
    sizes = [point.channels for point in points]
    handles = [
        backbone.get_submodule(point.path).register_forward_hook(
            partial(_scale_and_shift, scale_BC=scale, shift_BC=shift)
        )
        for point, scale, shift in zip(
            points, torch.split(scale_BD, sizes, dim=1), torch.split(shift_BD, sizes, dim=1), strict=True
        )
    ]
    try:
        yield backbone
    finally:
        for handle in handles:
            handle.remove()


def _scale_and_shift(
    module: nn.Module, inputs: Any, output: Tensor, scale_BC: Tensor, shift_BC: Tensor
) -> Tensor:
    if isinstance(module, nn.Linear) and torch.onnx.is_in_onnx_export():
        # A served graph adds to all tokens once less: (W x + b) * scale + shift, its bias taken together.
        output, shift_BC = linear(inputs[0], module.weight), module.bias * scale_BC + shift_BC
    if output.ndim == 4:
        scale, shift = scale_BC[:, :, None, None], shift_BC[:, :, None, None]
    else:
        scale, shift = scale_BC[:, None], shift_BC[:, None]
    # Not addcmul, which exports as two products. In the output's type, which autocast may have lowered.
    return output * scale.to(output.dtype) + shift.to(output.dtype)


def _channels(module: nn.Module) -> int:
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        return module.out_channels
    if isinstance(module, nn.BatchNorm2d):
        return module.num_features
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[-1]
    raise NetworkError(f"nothing is known of scaling and shifting what a {type(module).__name__} gives")
