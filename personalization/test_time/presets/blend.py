"""Preset `blend`: instance norm's statistics part of the way from the patch's own to the federation's.

The counterpart of `ladder` for networks with instance norm, where the dose goes the other way: such a network
takes every patch as it is, and the federation's statistics steady it. `doses` are the shares by thirds of
the norms. Nothing depends on the scans, so that one scan and a cohort get the same network.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from personalization.cancellation import CancelCheck
from personalization.iop_fl.space import RoutingSpace
from personalization.networks.instance_norm import Blended
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import Recipe

# Shares of the federation's statistics where no doses are given. A start: no benchmark has chosen it.
SHARES = (0.2, 0.2, 0.2)


class Blend(Recipe):
    """The global model with blended statistics. No pass at all; nothing is learned."""

    @override
    def architecture(self, space: RoutingSpace, config: AdaptationConfig) -> tuple[str, dict[str, Any]]:
        shares = SHARES if config.doses is None else config.doses
        own = {"backbone": space.network, "arguments": dict(space.arguments)}
        return "blended", {**own, "shares": list(shares)}

    @override
    def merged(
        self,
        space: RoutingSpace,
        learned: nn.Module | None,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> nn.Module:
        _, arguments = self.architecture(space, config)
        network = Blended(**arguments)
        network.network.load_state_dict(space.plain().state_dict())
        return network.to(images_NCHW.device).eval()


RECIPE = Blend()
