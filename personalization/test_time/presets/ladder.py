"""Preset `ladder`: batch norm's statistics part of the way from the federation's to these scans'."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from typing_extensions import override

from personalization.cancellation import CancelCheck
from personalization.export import to_onnx
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import Spread
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import ScanByShift, blended
from personalization.test_time.recipe import Recipe


def shift_graph(network: nn.Module, spread: Spread, in_channels: int, size: Sequence[int]) -> bytes:
    """The recipe with the dose by shift as an onnx graph, which takes all slices of a scan as one batch."""
    return to_onnx(ScanByShift(network, spread), in_channels, size)


class Ladder(Recipe):
    """The global model with blended statistics. One forward pass; nothing is learned."""

    @override
    def merged(
        self,
        space: RoutingSpace,
        learned: nn.Module | None,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> nn.Module:
        network = space.plain().to(images_NCHW.device)
        return blended(network, images_NCHW, config.ladder, check_cancelled)


RECIPE = Ladder()
