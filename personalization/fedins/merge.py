"""Merge a scale and shift into the weights, which gives a plain network without the cost of adapting.

This is only worth it for a delta that many images share. For one image, merging costs more than it saves.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from personalization.errors import NetworkError
from personalization.fedins.network import InstanceAdaptive
from personalization.fedins.pool import Delta, head_of
from personalization.networks import Backbone


@torch.no_grad()
def merge_single(network: InstanceAdaptive, delta: Delta) -> Backbone:
    """Copy the backbone and merge `delta`, of a batch of one, into its weights and its head.

    The copy's logits are those of `network.apply_delta` with this delta. Raises NetworkError for more than
    one delta, or if the pool's classes are not the backbone's.
    """
    if delta.scale_BD.shape[0] != 1:
        raise NetworkError(f"expected one delta, found {delta.scale_BD.shape[0]}: each needs its own weights")
    merged = copy.deepcopy(network.backbone)
    sizes = [point.channels for point in network.points]
    for point, scale, shift in zip(
        network.points,
        torch.split(delta.scale_BD[0], sizes),
        torch.split(delta.shift_BD[0], sizes),
        strict=True,
    ):
        _merge(point.path, merged.get_submodule(point.path), scale, shift)
    weight, bias = head_of(merged.get_submodule(merged.head_path))
    if weight.shape != delta.head_weight_BKF.shape[1:]:
        raise NetworkError(
            f"the pool's heads have {delta.head_bias_BK.shape[1]} classes, the backbone's {len(bias)}"
        )
    weight.copy_(delta.head_weight_BKF[0])
    bias.copy_(delta.head_bias_BK[0])
    return merged


def _merge(path: str, module: nn.Module, scale: Tensor, shift: Tensor) -> None:
    """Replace W, b by scale W, scale b + shift along the axis of the output's channels, in place."""
    weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
    if weight is None or bias is None:
        raise NetworkError(f"{path}: expected a weight and a bias to merge into")
    axis = 1 if isinstance(module, nn.ConvTranspose2d) else 0
    shape = [-1 if axis == index else 1 for index in range(weight.ndim)]
    weight.mul_(scale.reshape(shape))
    bias.mul_(scale).add_(shift)
