"""Preset `statistics`: nothing is learned, and batch norm takes the statistics of the images (`merge`)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from typing_extensions import override

from personalization.cancellation import CancelCheck
from personalization.iop_fl.space import RoutingSpace
from personalization.test_time.adapt import Learning
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.presets import paper
from personalization.test_time.recipe import Routing


class Statistics(Routing):
    """Routing over the global model alone, without a step."""

    @override
    def learning(
        self,
        space: RoutingSpace,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> Learning:
        """No parameter. Raises NetworkError for a network without batch norm."""
        return replace(super().learning(space, images_NCHW, config, check_cancelled), groups=(([], 0.0),))


# The loss is of the record of step 0 alone.
RECIPE = Statistics(paper.RECIPE.objective)
