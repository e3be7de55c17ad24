"""Preset `as-published`: IOP-FL outside as its authors' code runs it, over the loss of preset `official`.

- Pooled routers (Eq. 6) at PyTorch's random weights, so that coefficients start near 0.5 and not at 1/(K+1).
- Dropout of 0.2 in the routers, in every forward of a step.
- The bottleneck's routers keep their random weights: the code's list of learned layers leaves them out.
- Batch norm has the statistics of each batch, which is 5 neighbouring slices.

Two things stay Locum's. The epoch is chosen by the loss and not by labels. What is served is one plain
network: the mean coefficients of the chosen epoch, without dropout, and batch-norm statistics of the cohort.
The code's transposed convolutions mix one model more than its convolutions when there are five members; here
every layer mixes all.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from personalization.cancellation import CancelCheck
from personalization.iop_fl.network import route, routed_layers
from personalization.iop_fl.space import RoutingSpace
from personalization.seeds import seed_of
from personalization.test_time.adapt import Learning, routing
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.presets import official
from personalization.test_time.recipe import Routing

DROPOUT = 0.2
# The part of a U-Net that the code's list of layers leaves out.
NOT_LEARNED = "bottleneck."


class AsPublished(Routing):
    """Routing with the routers of the authors' code."""

    @override
    def learning(
        self,
        space: RoutingSpace,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> Learning:
        """The routers as they are drawn from the configuration's seed."""
        generator = torch.Generator().manual_seed(seed_of(config.seed, "routers"))
        network = route(space, config.router, "official", DROPOUT, generator).to(images_NCHW.device)
        found = routing(network, config, self.objective)
        left_out = {
            parameter
            for name, layer in routed_layers(network).items()
            if name.startswith(NOT_LEARNED)
            for parameter in layer.router.parameters()
        }
        groups = tuple(
            ([p for p in parameters if p not in left_out], rate) for parameters, rate in found.groups
        )
        return replace(found, groups=groups)


RECIPE = AsPublished(official.RECIPE.objective)
