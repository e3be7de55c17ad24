"""Preset `ttt` (Sun et al., ICML 2020): test-time training by predicting quarter turns.

For each slice one step of SGD, of 1e-3 and without momentum, on `batch_size` views of it that are shifted,
flipped and turned at random; it moves the encoder and the head that tells the turns, which the federation
trained along (`rotation_head`). The decoder stays, and so do batch norm's statistics: the authors' networks
have group norm, which has none.

A cohort's slices are taken in their order, each from where the one before ended (the paper's online version).
One scan starts from the trained weights (its standard version); it takes ten steps at least, as the authors'
scripts do for one image. The authors may skip an image on which the head is sure; by default they skip none.
The network of the last step is kept if it tells the turns of the slices better than the one of step 0.

Legend: B images of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.cancellation import CancelCheck
from personalization.iop_fl.layers import fix_statistics
from personalization.iop_fl.space import RoutingSpace
from personalization.networks.capabilities import head_paths
from personalization.networks.rotation import (
    TURNS,
    check_square,
    every_turn_loss,
    required_turns,
    rotation_loss,
)
from personalization.test_time.adapt import Learning
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import Batch, Objective, Terms
from personalization.test_time.recipe import Recipe

RATE = 1e-3
STEPS = 10
_USE = "preset ttt learns from quarter turns"


class Turns(Objective):
    """Cross-entropy of the quarter turns."""

    @override
    def terms(self, network: nn.Module, batch: Batch, config: AdaptationConfig, seed: int) -> Terms:
        loss = every_turn_loss(required_turns(network, _USE), batch.images)
        return Terms(loss, torch.softmax(network(batch.images), dim=1))

    @override
    def ceiling(self, config: AdaptationConfig, largest_batch: int, classes: int) -> float:
        # A head that knows nothing
        return math.log(TURNS)

    @override
    def epoch_batches(self, count: int, config: AdaptationConfig, epoch: int) -> Sequence[Tensor]:
        """One slice after the other, repeated until there are enough steps."""
        return [*torch.split(torch.arange(count), 1)] * math.ceil(STEPS / count)

    @override
    def step(
        self,
        network: nn.Module,
        batch: Batch,
        config: AdaptationConfig,
        optimiser: torch.optim.Optimizer,
        seed: int,
    ) -> float:
        """One step of plain SGD, of which the optimiser keeps no moments."""
        copies = batch.images.expand(config.batch_size, *batch.images.shape[1:])
        generator = torch.Generator().manual_seed(seed)
        loss = rotation_loss(required_turns(network, _USE), copies, generator)
        value = loss.item()
        if math.isfinite(value):
            learned = [parameter for group in optimiser.param_groups for parameter in group["params"]]
            slopes = torch.autograd.grad(loss, learned)
            with torch.no_grad():
                for parameter, slope in zip(learned, slopes, strict=True):
                    parameter.sub_(RATE * slope)
        return value


class Ttt(Recipe):
    """The global model with another encoder."""

    @override
    def learning(
        self,
        space: RoutingSpace,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> Learning:
        """The global model, all of which is learned but the layers after the encoder.

        Raises NetworkError for one without a head that tells turns, and for images that cannot be turned.
        """
        network = space.plain().to(images_NCHW.device)
        required_turns(network, _USE)
        check_square(images_NCHW.shape[2:])
        fix_statistics(network)
        decoder = tuple(f"{path}." for path in head_paths(network))
        learned = [p for name, p in network.named_parameters() if not name.startswith(decoder)]
        start = {f"start/{name}": p.detach().clone() for name, p in network.named_parameters()}
        return Learning(network, ((learned, RATE),), Turns(), start)

    @override
    def merged(
        self,
        space: RoutingSpace,
        learned: nn.Module | None,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> nn.Module:
        assert learned is not None
        network = space.plain().to(images_NCHW.device)
        network.load_state_dict(learned.state_dict())
        return network.eval()


RECIPE = Ttt()
