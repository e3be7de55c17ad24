"""Insertion points of scale and shift (SSF, Lian et al., 2022) in a frozen network, per image of a batch.

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
from personalization.networks import Backbone, BlockBackbone
from personalization.networks.capabilities import BatchNorm, Convolution, spatial_axes


@dataclass(frozen=True)
class Point:
    """An insertion point: the path of a module, and the number of its output channels."""

    path: str
    channels: int


def points_of(backbone: Backbone, blocks: int | None = None) -> tuple[Point, ...]:
    """List the insertion points of a network, in execution order; those of its last `blocks` blocks alone.

    Raises NetworkError for blocks that it does not have.
    """
    paths = backbone.ssf_paths if blocks is None else with_blocks(backbone, blocks).last_ssf_paths(blocks)
    return tuple(Point(path, _channels(backbone.get_submodule(path))) for path in paths)


def with_blocks(backbone: Backbone, blocks: int) -> BlockBackbone:
    """The backbone, which has so many blocks. Raises NetworkError for another."""
    if not isinstance(backbone, BlockBackbone):
        raise NetworkError(f"blocks: expected a network of blocks, found a {type(backbone).__name__}")
    if not 1 <= blocks <= backbone.depth:
        raise NetworkError(f"blocks: expected 1 to {backbone.depth}, found {blocks}")
    return backbone


@contextmanager
def adapted(
    backbone: Backbone, points: Sequence[Point], scale_BD: Tensor, shift_BD: Tensor
) -> Iterator[Backbone]:
    """Within the context, replace the output x of every point by `x * scale + shift`, along its channels.

    Each image has its own scale and shift: [B, 1, C] on tokens, [B, C, 1, ...] on maps. With B = 1 all images
    share them. Gradients flow into scale and shift. Two threads must not use one network at once.
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
        # Saves one addition over all tokens in the graph: (W x + b) * scale + shift with one merged bias.
        output, shift_BC = linear(inputs[0], module.weight), module.bias * scale_BC + shift_BC
    if isinstance(module, Convolution | BatchNorm):
        on_maps = (slice(None), slice(None), *(None for _ in spatial_axes(output)))
        scale, shift = scale_BC[on_maps], shift_BC[on_maps]
    else:
        scale, shift = scale_BC[:, None], shift_BC[:, None]
    # Not addcmul, which exports as two products. Cast to the output's type, which autocast may have lowered.
    return output * scale.to(output.dtype) + shift.to(output.dtype)


def _channels(module: nn.Module) -> int:
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, Convolution):
        return module.out_channels
    if isinstance(module, BatchNorm):
        return module.num_features
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[-1]
    raise NetworkError(f"a {type(module).__name__} cannot be scaled and shifted: its channels are unknown")
