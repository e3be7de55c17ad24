"""Preset `vptta` (Chen et al., CVPR 2024), for one scan: one step of a low-frequency prompt, then the answer.

Batch norm uses, layer by layer, m of the scan's statistics and 1 - m of training's, with m = 5/6: that of the
first sample in the authors' code, since nothing is carried from one scan to the next. The step minimises how
far each slice's statistics are from these. The prompt is `Prompted`'s, as for preset `prompt`.

Legend: B slices, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.cancellation import CancelCheck
from personalization.iop_fl.space import RoutingSpace
from personalization.networks.capabilities import (
    BatchNorm,
    moving_norms,
    required_norms,
    running,
    spatial_axes,
)
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import thinned
from personalization.test_time.presets.prompt import RECIPE as PROMPT
from personalization.test_time.presets.prompt import correction, prompted
from personalization.test_time.recipe import Recipe

RATE, BETAS = 0.05, (0.9, 0.99)
# 1 / (sqrt(t) / 5 + 1) at the first scan, t = 1.
SHARE = 1 / (1 / 5 + 1)


class Vptta(Recipe):
    """The global model behind a prompt, with statistics near the scan's. Two forward passes and one back."""

    @override
    def architecture(
        self, space: RoutingSpace, images_NCHW: Tensor, config: AdaptationConfig
    ) -> tuple[str, dict[str, Any]]:
        return PROMPT.architecture(space, images_NCHW, config)

    @override
    def merged(
        self,
        space: RoutingSpace,
        learned: nn.Module | None,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> nn.Module:
        """One step of Adam over the scan's slices together."""
        images = thinned(images_NCHW, learned=True)
        network = prompted(space, images_NCHW).requires_grad_(False)
        required_norms(network, "preset vptta moves statistics")
        network.prompt.requires_grad_(True)
        optimiser = torch.optim.Adam([network.prompt], lr=RATE, betas=BETAS)
        sources = {
            norm: (mean.clone(), variance.clone())
            for norm in moving_norms(network).values()
            for mean, variance in [running(norm)]
        }
        losses: list[Tensor] = []

        def move(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert isinstance(norm, BatchNorm)
            losses.append(_moved(norm, *sources[norm], inputs[0]))

        handles = [norm.register_forward_pre_hook(move) for norm in sources]
        try:
            network(images)
            check_cancelled()
            torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            with torch.no_grad():
                network(images)
        finally:
            for handle in handles:
                handle.remove()
        return network.requires_grad_(False)


def _moved(norm: BatchNorm, mean: Tensor, variance: Tensor, features_BC: Tensor) -> Tensor:
    """Set the norm's statistics between training's and the features', and return how far the slices are."""
    seen, axes = features_BC.detach(), spatial_axes(features_BC)
    seen_variance, seen_mean = torch.var_mean(seen, dim=(0, *axes), correction=correction(seen[:, 0]))
    norm.running_mean = SHARE * seen_mean + (1 - SHARE) * mean
    norm.running_var = SHARE * seen_variance + (1 - SHARE) * variance
    # Not the root of the variance: in a constant slice, that has no gradient
    own_deviation, own_mean = torch.std_mean(features_BC, dim=axes, correction=correction(seen[0, 0]))
    away = (norm.running_mean - own_mean).abs().mean()
    return away + (norm.running_var.sqrt() - own_deviation).abs().mean()


RECIPE = Vptta()
