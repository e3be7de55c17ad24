"""Networks that are bad on purpose, which a gate must refuse."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from benchmarks.accuracy.papers.official import NO_LIMITS
from benchmarks.harness.evaluation import BATCH
from personalization.cancellation import never_cancelled
from personalization.iop_fl.network import route
from personalization.iop_fl.space import RoutingSpace
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import adapt, recipe_of

RATE_FACTOR = 100
# A layer in the middle: the harm of one is less plain than that of all.
ONE_LAYER = "bottleneck.bottleneck_conv1"


def overdosed_tent(space: RoutingSpace, images: Tensor, seed: int) -> tuple[str, nn.Module]:
    """Tent at a hundred times its rate on the first images, and what it is called."""
    config = AdaptationConfig(preset="tent", seed=seed)
    config = config.model_copy(update={"bn_rate": RATE_FACTOR * config.bn_rate, "epochs": 2})
    few = images[: 2 * BATCH]
    network = route(space.alone()).to(images.device)
    adapt(network, few, config, limits=NO_LIMITS)
    merged = recipe_of("tent").merged(space.alone(), network, few, config, never_cancelled)
    return f"Tent, rate x{RATE_FACTOR}", merged


def shuffled(network: nn.Module, generator: torch.Generator, only: str = "") -> nn.Module:
    """A copy with the weights of its convolutions, or of one of them, in random order."""
    changed = copy.deepcopy(network)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if parameter.ndim == 4 and name.startswith(only):
                order = torch.randperm(parameter.numel(), generator=generator)
                parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return changed
