"""From a routed network to one plain network, which costs what any plain network costs, whatever K is.

Legend: N images, L routed layers, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.iop_fl.batch_norm import PRIOR_IMAGES, bake_statistics
from personalization.iop_fl.network import coefficients, routed_layers
from personalization.iop_fl.space import GLOBAL, RoutingSpace


def merge(
    space: RoutingSpace,
    network: nn.Module,
    images_NCHW: Tensor,
    *,
    batch_size: int = 16,
    prior_images: float = PRIOR_IMAGES,
    check_cancelled: CancelCheck = never_cancelled,
) -> nn.Module:
    """The plain network of a routed one, for the hospital whose images these are (1.7); in eval mode.

    Each layer's coefficients are averaged over the images and its experts mixed by them, once. Where batch
    norm follows, the coefficients are first divided by their sum: batch norm would take out the scale
    anyway, and the weights keep the size of a model's, which the prior's statistics belong to. Elsewhere
    (up-convolutions, head) the scale matters and stays. Batch norm gets the adapted affine parameters and
    statistics baked on the merged network, drawn towards the global model's as if those were worth
    `prior_images` images; 0 switches that off.

    With direct coefficients, one batch of all images and no prior it equals the routed network. With
    per-image coefficients it is an approximation. The routed network is left as it was. `check_cancelled` is
    called before every batch, and may raise.
    """
    merged = space.plain().to(images_NCHW.device)
    with torch.no_grad():
        mean_LE = mean_coefficients(network, images_NCHW, batch_size, check_cancelled)
        for (name, layer), row in zip(routed_layers(network).items(), mean_LE, strict=True):
            plain = merged.get_submodule(name)
            weight, bias = layer.mixed(row)
            _set(plain, "weight", weight)
            if bias is not None:
                _set(plain, "bias", bias)
        for name, module in network.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                for field, parameter in module.named_parameters():
                    _set(merged.get_submodule(name), field, parameter)
    return bake_statistics(
        merged, images_NCHW, batch_size, space.experts[GLOBAL], prior_images, check_cancelled
    )


def mean_coefficients(
    network: nn.Module,
    images_NCHW: Tensor,
    batch_size: int = 16,
    check_cancelled: CancelCheck = never_cancelled,
) -> Tensor:
    """The coefficients [L, E] of `merge`: means over the images, with sum 1 where batch norm follows."""
    mean_LE = coefficients(network, images_NCHW, batch_size, check_cancelled).mean(dim=0)
    follows = [layer.normalised for layer in routed_layers(network).values()]
    scale = torch.where(torch.tensor(follows, device=mean_LE.device), mean_LE.sum(dim=1), 1.0)
    return mean_LE / scale[:, None]


def _set(module: nn.Module, field: str, value: Tensor) -> None:
    module.get_parameter(field).copy_(value)
