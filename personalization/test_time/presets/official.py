"""Preset `official`: 0.1 C + S + 10 E, as the public code of IOP-FL reduces and perturbs.

E grows with the batch, and S is 1e-6 times a norm. A view has noise, then a random flip and quarter turns.
The code seeds itself before every step, so it draws the same each time. Its batches are neighbouring slices.
The paper and the code weigh and reduce the terms so differently that they are two methods.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.seeds import seed_of
from personalization.test_time import losses
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import LossWeights, WeightedSum
from personalization.test_time.perturb import RotFlip, add_noise
from personalization.test_time.recipe import Routing


class Official(WeightedSum):
    """The published code's terms, batches and seeds."""

    @override
    def disturbed(
        self, network: nn.Module, images_BCHW: Tensor, config: AdaptationConfig, generator: torch.Generator
    ) -> Tensor:
        """Probabilities of the images with noise, flipped and turned, then turned and flipped back."""
        view = add_noise(images_BCHW, generator, config.noise)
        turned = RotFlip.draw(view, generator)
        return turned.undo(torch.softmax(network(turned.apply(view)), dim=1))

    @override
    def shape(self, probabilities_BKHW: Tensor) -> Tensor:
        return losses.official_shape(probabilities_BKHW)

    @override
    def entropy(self, probabilities_BKHW: Tensor) -> Tensor:
        return losses.official_entropy(probabilities_BKHW)

    @override
    def ceiling(self, config: AdaptationConfig, largest_batch: int, classes: int) -> float:
        weights = self.weights(config)
        # The entropy is B / K times the normalised one
        return weights.consistency + weights.entropy * largest_batch / classes

    @override
    def batches(self, count: int, config: AdaptationConfig) -> Sequence[Tensor]:
        return torch.split(torch.arange(count), config.batch_size)

    @override
    def step_seed(self, config: AdaptationConfig, epoch: int, step: int) -> int:
        return seed_of(config.seed, "step")


RECIPE = Routing(Official(LossWeights(consistency=0.1, shape=1.0, entropy=10.0)))
