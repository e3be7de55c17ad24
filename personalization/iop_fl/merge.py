"""Merge a routed network into one plain network, with inference cost independent of the number of experts.

Legend: N images, L routed layers, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.iop_fl.batch_norm import PRIOR_IMAGES, bake_statistics
from personalization.iop_fl.network import coefficients, routed_layers
from personalization.iop_fl.space import GLOBAL, RoutingSpace
from personalization.networks.capabilities import batch_norms


def merge(
    space: RoutingSpace,
    network: nn.Module,
    images_NCHW: Tensor,
    *,
    batch_size: int = 16,
    prior_images: float = PRIOR_IMAGES,
    check_cancelled: CancelCheck = never_cancelled,
) -> nn.Module:
    """Merge a routed network into a plain network in eval mode, for the hospital of these images (1.7).

    Each layer's experts are mixed once, by its coefficients averaged over the images. If batch norm follows,
    the coefficients are first divided by their sum: batch norm would cancel the scale anyway, and the weights
    keep the scale of a model, to which the prior's statistics belong. Elsewhere (up-convolutions, head) the
    scale matters and is kept. Batch norm gets the adapted affine parameters and statistics recalibrated on
    the merged network. The global model's statistics count as `prior_images` images; 0 disables them.

    With direct coefficients, one batch of all images and no prior, the result equals the routed network. With
    per-image coefficients it is an approximation. The routed network is not changed. `check_cancelled` is
    called before every batch, and may raise.
    """
    merged = merged_weights(space, network, images_NCHW, batch_size, check_cancelled)
    return bake_statistics(
        merged, images_NCHW, batch_size, space.experts[GLOBAL], prior_images, check_cancelled
    )


def merged_weights(
    space: RoutingSpace,
    network: nn.Module,
    images_NCHW: Tensor,
    batch_size: int = 16,
    check_cancelled: CancelCheck = never_cancelled,
) -> nn.Module:
    """`merge` with the global model's batch-norm statistics, which belong to other weights."""
    merged = space.plain().to(images_NCHW.device)
    with torch.no_grad():
        mean_LE = mean_coefficients(network, images_NCHW, batch_size, check_cancelled)
        for (name, layer), row in zip(routed_layers(network).items(), mean_LE, strict=True):
            plain = merged.get_submodule(name)
            weight, bias = layer.mixed(row)
            _set(plain, "weight", weight)
            if bias is not None:
                _set(plain, "bias", bias)
        for name, norm in batch_norms(network).items():
            for field, parameter in norm.named_parameters():
                _set(merged.get_submodule(name), field, parameter)
    return merged.eval()


def mean_coefficients(
    network: nn.Module,
    images_NCHW: Tensor,
    batch_size: int = 16,
    check_cancelled: CancelCheck = never_cancelled,
) -> Tensor:
    """Compute the coefficients [L, E] of `merge`: means over the images, with sum 1 if batch norm follows."""
    mean_LE = coefficients(network, images_NCHW, batch_size, check_cancelled).mean(dim=0)
    follows = [layer.normalised for layer in routed_layers(network).values()]
    scale = torch.where(torch.tensor(follows, device=mean_LE.device), mean_LE.sum(dim=1), 1.0)
    return mean_LE / scale[:, None]


def _set(module: nn.Module, field: str, value: Tensor) -> None:
    module.get_parameter(field).copy_(value)
