"""Preset `prompt`: a low-frequency filter before the network, after which its layers see what they know.

    L = mean over batch norms of mean_c |mean_l(x') - mean_l| + mean_c |sd_l(x') - sd_l|

with the statistics of the batch x' behind the filter and those of training. No weight changes (VPTTA, Chen et
al., CVPR 2024; ProSFDA, Hu et al., for a cohort). The filter is one for the whole hospital.

Legend: B images of a batch, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.cancellation import CancelCheck
from personalization.iop_fl.layers import fix_statistics
from personalization.iop_fl.space import RoutingSpace
from personalization.networks import Prompted
from personalization.networks.capabilities import BatchNorm, required_norms, running, spatial_axes
from personalization.networks.instance_norm import TrackedInstanceNorm, tracked_norms
from personalization.networks.prompted import sizes
from personalization.test_time.adapt import Learning
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import Batch, Objective, Terms
from personalization.test_time.recipe import Recipe

RATE = 0.01
# Steps of an epoch at least: a prompt of a few numbers needs some steps, however few the scans are.
STEPS = 5
# About the most the loss is: half a standard deviation in every channel.
_CEILING = 1.0


class Matching(Objective):
    """How far the statistics that batch norms see are from those of training."""

    @override
    def terms(self, network: nn.Module, batch: Batch, config: AdaptationConfig, seed: int) -> Terms:
        losses: list[Tensor] = []
        handles = [
            norm.register_forward_pre_hook(lambda norm, inputs: losses.append(mismatch(norm, inputs[0])))
            for norm in _known(network).values()
        ]
        try:
            logits = network(batch.images)
        finally:
            for handle in handles:
                handle.remove()
        return Terms(torch.stack(losses).mean(), torch.softmax(logits, dim=1))

    @override
    def ceiling(self, config: AdaptationConfig, largest_batch: int, classes: int) -> float:
        return _CEILING

    @override
    def epoch_batches(self, count: int, config: AdaptationConfig, epoch: int) -> Sequence[Tensor]:
        """The batches, repeated until there are enough steps."""
        batches = self.batches(count, config)
        return [*batches] * math.ceil(STEPS / len(batches))


def _known(network: nn.Module) -> dict[str, BatchNorm] | dict[str, TrackedInstanceNorm]:
    """The norms that know the statistics of training. Raises NetworkError for a network without any."""
    return tracked_norms(network) or required_norms(network, "a prompt is learned from statistics")


def mismatch(norm: nn.Module, features_BC: Tensor) -> Tensor:
    """mean_c |mean - running mean| + mean_c |sd - running sd|, over the batch; with instance norm, image by
    image."""
    assert isinstance(norm, BatchNorm | TrackedInstanceNorm)
    usual_mean, usual_variance = running(norm)
    axes, values = (0, *spatial_axes(features_BC)), features_BC[:, 0]
    if isinstance(norm, TrackedInstanceNorm):
        axes, values = axes[1:], values[0]
    # Not the root of the variance: in a constant channel, that has no gradient
    deviation, mean = torch.std_mean(features_BC, dim=axes, correction=correction(values))
    return (mean - usual_mean).abs().mean() + (deviation - usual_variance.sqrt()).abs().mean()


def correction(values: Tensor) -> int:
    """1, as in the authors' code; 0 for a single value, so that it deviates by 0 and not by NaN."""
    return min(1, values.numel() - 1)


def prompted(space: RoutingSpace, images_NCHW: Tensor) -> Prompted:
    """The global model with a prompt that changes nothing yet.

    Raises NetworkError for a network without statistics that a prompt could learn from.
    """
    network = Prompted(space.network, dict(space.arguments), **sizes(images_NCHW.shape[2:]))
    network.network = space.plain()
    _known(network)
    return network.to(images_NCHW.device).eval()


class Prompt(Recipe):
    """One filter for the cohort."""

    @override
    def architecture(
        self, space: RoutingSpace, images_NCHW: Tensor, config: AdaptationConfig
    ) -> tuple[str, dict[str, Any]]:
        own = {"backbone": space.network, "arguments": dict(space.arguments)}
        return "prompted", own | sizes(images_NCHW.shape[2:])

    @override
    def learning(
        self,
        space: RoutingSpace,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> Learning:
        network = prompted(space, images_NCHW)
        fix_statistics(network)
        return Learning(network, (([network.prompt], RATE),), Matching())

    @override
    def merged(
        self,
        space: RoutingSpace,
        learned: nn.Module | None,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> nn.Module:
        assert isinstance(learned, Prompted)
        network = prompted(space, images_NCHW)
        network.load_state_dict(learned.state_dict())
        return network.requires_grad_(False)


RECIPE = Prompt()
