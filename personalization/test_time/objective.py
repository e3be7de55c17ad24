"""The unsupervised loss of one batch, and of all images after an epoch.

Legend: B batch, C channels, K classes, H and W height and width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.cancellation import CancelCheck
from personalization.iop_fl.network import mixed_indices
from personalization.iop_fl.routers import PooledRouter
from personalization.seeds import seed_of
from personalization.test_time import losses
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.perturb import add_noise
from personalization.test_time.safety import MaskOverlap, MaskStats


@dataclass(frozen=True)
class Batch:
    """Images [B, C, H, W] of a cohort, and which of its images they are [B]."""

    images: Tensor
    indices: Tensor

    @classmethod
    def of(cls, images_NCHW: Tensor, indices_B: Tensor) -> Batch:
        """These of the cohort's images."""
        return cls(images_NCHW[indices_B], indices_B)

    def on(self, network: nn.Module) -> Batch:
        """The same where, and of the type in which, the network computes."""
        reference = next(network.parameters())
        return Batch(self.images.to(reference.device, reference.dtype), self.indices)


@dataclass(frozen=True)
class Terms:
    """The loss of one batch, a scalar, and the probabilities [B, K, H, W] of the images as they are.

    `consistency`, `shape` and `entropy` are terms for the record; None: not measured.
    """

    loss: Tensor
    probabilities: Tensor
    consistency: Tensor | None = None
    shape: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True)
class EpochScore:
    """The terms as means over all images, and what the masks look like beside those of step 0.

    A term that was not measured is NaN.
    """

    consistency: float
    shape: float
    entropy: float
    reading: MaskStats


class Objective(ABC):
    """The objective of a preset and its optimisation step; see `presets`.

    A subclass gives `terms` and `ceiling`, and overrides `step` where a step is more than one gradient of the
    loss. All randomness comes from the seeds that are given.
    """

    @abstractmethod
    def terms(self, network: nn.Module, batch: Batch, config: AdaptationConfig, seed: int) -> Terms:
        """The loss of one batch, with gradient where gradients are enabled; epochs are compared by it too."""

    @abstractmethod
    def ceiling(self, config: AdaptationConfig, largest_batch: int, classes: int) -> float:
        """About the most the loss can be: what `SafetyLimits.slack` is a share of."""

    def step(
        self,
        network: nn.Module,
        batch: Batch,
        config: AdaptationConfig,
        optimiser: torch.optim.Optimizer,
        seed: int,
    ) -> float:
        """Learn from one batch; the loss before. A loss that is not finite changes nothing."""
        loss = self.terms(network, batch, config, seed).loss
        value = loss.item()
        if math.isfinite(value):
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
        return value

    def batches(self, count: int, config: AdaptationConfig) -> Sequence[Tensor]:
        """The indices of each batch in which images are measured: even, and each from all over, as batch norm
        needs."""
        return mixed_indices(count, config.batch_size)

    def epoch_batches(
        self,
        count: int,
        config: AdaptationConfig,
        epoch: int,  # noqa: ARG002
    ) -> Sequence[Tensor]:
        """The indices of each batch of one epoch of learning, in their order."""
        return self.batches(count, config)

    def step_seed(self, config: AdaptationConfig, epoch: int, step: int) -> int:
        """The seed of one step."""
        return seed_of(config.seed, "step", epoch, step)


@dataclass(frozen=True)
class LossWeights:
    """How much each term of the loss counts."""

    consistency: float
    shape: float
    entropy: float


class WeightedSum(Objective):
    """c C + s S + e E (IOP-FL, Eqs. 7-10): consistency C under noise, shape distance S, entropy E.

    Terms are mean-reduced. Where c is 0 there is one forward of the images, and C is not measured.
    """

    def __init__(self, weights: LossWeights) -> None:
        self._weights = weights

    def weights(self, config: AdaptationConfig) -> LossWeights:
        """The preset's weights, with `shape_weight` in place of its own if one is given."""
        own = self._weights
        return own if config.shape_weight is None else replace(own, shape=config.shape_weight)

    @override
    def terms(self, network: nn.Module, batch: Batch, config: AdaptationConfig, seed: int) -> Terms:
        """The loss of one batch.

        Two forwards: one of the images, one of their perturbed view; a third where dropout makes a second
        look at the same images differ (1.4, the reference loop's o, o1 and o2).
        """
        weights, images_BCHW = self.weights(config), batch.images
        dropout = _reseed_dropout(network, seed)
        probabilities = torch.softmax(network(images_BCHW), dim=1)
        consistency = None
        if weights.consistency:
            generator = torch.Generator().manual_seed(seed)
            disturbed = self.disturbed(network, images_BCHW, config, generator)
            again = torch.softmax(network(images_BCHW), dim=1) if dropout else probabilities
            consistency = losses.consistency(disturbed, again)
        entropy = self.entropy(probabilities)
        # Where it counts for nothing it is measured but not learned from: its gradient costs as much again
        with torch.set_grad_enabled(weights.shape > 0 and torch.is_grad_enabled()):
            shape = self.shape(probabilities)
        weighted = [(weights.consistency, consistency), (weights.shape, shape), (weights.entropy, entropy)]
        loss = reduce(torch.add, [weight * term for weight, term in weighted if term is not None])
        return Terms(loss, probabilities, consistency, shape, entropy)

    @override
    def ceiling(self, config: AdaptationConfig, largest_batch: int, classes: int) -> float:
        weights = self.weights(config)
        # Consistency and normalised entropy are at most 1 each
        return weights.consistency + weights.entropy

    def disturbed(
        self, network: nn.Module, images_BCHW: Tensor, config: AdaptationConfig, generator: torch.Generator
    ) -> Tensor:
        """Probabilities [B, K, H, W] of a perturbed view of the images: with noise."""
        return torch.softmax(network(add_noise(images_BCHW, generator, config.noise)), dim=1)

    def shape(self, probabilities_BKHW: Tensor) -> Tensor:
        """S of these probabilities, a scalar."""
        return losses.shape_distance(probabilities_BKHW, losses.shape_range(*probabilities_BKHW.shape[2:]))

    def entropy(self, probabilities_BKHW: Tensor) -> Tensor:
        """E of these probabilities, a scalar."""
        return losses.entropy(probabilities_BKHW)


@torch.no_grad()
def class_maps(network: nn.Module, batches: Iterable[Batch], check_cancelled: CancelCheck) -> list[Tensor]:
    """The most probable class of every pixel, uint8 [B, H, W] on the CPU, for each batch."""
    network.eval()
    maps = []
    for batch in batches:
        check_cancelled()
        maps.append(network(batch.on(network).images).argmax(dim=1).to("cpu", torch.uint8))
    return maps


@torch.no_grad()
def score(
    objective: Objective,
    network: nn.Module,
    batches: Iterable[Batch],
    config: AdaptationConfig,
    before: Sequence[Tensor],
    check_cancelled: CancelCheck,
) -> EpochScore:
    """The loss over all images, without dropout, with noise that is the same at every call.

    `before` are step 0's class maps of the same batches. The terms are means of the batches', each counted by
    its images.
    """
    network.eval()
    rows, counts = [], []
    overlap: MaskOverlap | None = None
    for index, (batch, masks) in enumerate(zip(batches, before, strict=True)):
        check_cancelled()
        seed = seed_of(config.seed, "score", index)
        terms = objective.terms(network, batch.on(network), config, seed)
        overlap = overlap or MaskOverlap(terms.probabilities.shape[1])
        overlap.add(terms.probabilities.argmax(dim=1), masks)
        measured = (terms.loss, terms.consistency, terms.shape, terms.entropy)
        there = [term for term in measured if term is not None]
        values = iter(torch.stack(there).tolist())
        rows.append([math.nan if term is None else next(values) for term in measured])
        counts.append(len(batch.indices))
    assert overlap is not None  # there is at least one batch
    loss, consistency, shape, entropy = (
        sum(value * count for value, count in zip(column, counts, strict=True)) / sum(counts)
        for column in zip(*rows, strict=True)
    )
    most = objective.ceiling(config, max(counts), overlap.classes)
    return EpochScore(
        consistency, shape, entropy, MaskStats(loss, most, overlap.sizes(), overlap.agreement())
    )


def json_float(value: float) -> float | None:
    """The value, or None for what JSON cannot hold."""
    return value if math.isfinite(value) else None


def _reseed_dropout(network: nn.Module, seed: int) -> bool:
    """Make the masks of dropout those of `seed`; whether there are any."""
    routers = [module for module in network.modules() if isinstance(module, PooledRouter) and module.dropout]
    for router in routers:
        router.generator.manual_seed(seed)
    return network.training and bool(routers)
