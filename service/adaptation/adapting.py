"""One adaptation as a job makes it: route, adapt, merge, wherever torch is to work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from personalization.routing.adapt import Adaptation, adapt, space_for
from personalization.routing.checkpoint import Checkpoint
from personalization.routing.config import AdaptationConfig
from personalization.routing.merge import merge
from personalization.routing.network import batches, route
from personalization.routing.space import RoutingSpace
from personalization.tick import Tick

# Images per forward where nothing is learned: bounds the memory. It changes no result but the coefficients of
# pooled routers, which see the statistics of their batch.
_BATCH = 16


@dataclass(frozen=True)
class Adapted:
    """`routed` is the network over `space` at its chosen epoch, `merged` the plain one that is served."""

    adaptation: Adaptation
    space: RoutingSpace
    routed: nn.Module
    merged: nn.Module


def adapt_and_merge(
    space: RoutingSpace,
    images: Tensor,
    config: AdaptationConfig,
    device: torch.device,
    tick: Tick,
    *,
    resume: Checkpoint | None = None,
    after_epoch: Callable[[nn.Module, Checkpoint], None] | None = None,
) -> Adapted:
    """Adapt to `images` [N, C, H, W]; deterministic. Raises what `adapt`, `tick` and `after_epoch` raise."""
    space = space_for(config, space)
    network = route(space, config.router).to(device)
    images = images.to(device)

    def note(checkpoint: Checkpoint) -> None:
        if after_epoch is not None:
            after_epoch(network, checkpoint)

    adaptation = adapt(network, images, config, resume=resume, after_epoch=note, tick=tick)
    merged = merge(space, network, images, batch_size=_BATCH, tick=tick)
    return Adapted(adaptation, space, network, merged)


def class_maps(network: nn.Module, images: Tensor, device: torch.device, tick: Tick) -> NDArray[np.uint8]:
    """Class indices [N, H, W] that a plain network gives, with its running statistics, as it is served."""
    network = network.to(device).eval()
    maps = []
    with torch.no_grad():
        for batch in batches(images, _BATCH):
            tick()
            maps.append(network(batch.to(device)).argmax(dim=1).to(torch.uint8).cpu().numpy())
    return np.concatenate(maps)
