"""Preset `intent` (InTEnt, Dong et al., CVPR Workshops 2024), for one scan: a ladder's rungs, averaged."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from typing_extensions import override

from personalization.cancellation import CancelCheck
from personalization.export import to_onnx
from personalization.iop_fl.batch_norm import blend_statistics, doses_by_depth
from personalization.iop_fl.space import RoutingSpace
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import Rungs, ScanLadder, thinned
from personalization.test_time.recipe import Recipe

# Six rungs, from training's statistics to the scan's.
RUNGS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def scan_graph(network: nn.Module, in_channels: int, size: Sequence[int]) -> bytes:
    """The recipe as an onnx graph, which takes all slices of a scan as one batch and needs no torch."""
    return to_onnx(ScanLadder(network, RUNGS), in_channels, size)


class Intent(Recipe):
    """The global model on six rungs. Twelve forward passes; nothing is learned."""

    @override
    def merged(
        self,
        space: RoutingSpace,
        learned: nn.Module | None,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> nn.Module:
        """All rungs in one network, which answers for the scan as a whole."""
        measured = thinned(images_NCHW)
        networks = []
        for dose in RUNGS:
            network = space.plain().to(images_NCHW.device)
            doses = doses_by_depth(network, (dose, dose, dose))
            networks.append(blend_statistics(network, measured, doses, len(measured), check_cancelled))
        return Rungs(networks).eval()


RECIPE = Intent()
