"""The unsupervised loss of one batch, and of all images after an epoch.

Legend: B batch, C channels, K classes, H and W height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck
from personalization.iop_fl.routers import PooledRouter
from personalization.seeds import seed_of
from personalization.test_time import losses
from personalization.test_time.config import AdaptationConfig, LossWeights
from personalization.test_time.perturb import RotFlip, add_noise
from personalization.test_time.safety import MaskOverlap, MaskStats


@dataclass(frozen=True)
class Terms:
    """The terms of the loss, scalars; `loss` is their weighted sum."""

    loss: Tensor
    consistency: Tensor
    shape: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class EpochScore:
    """The terms as means over all images, and what the masks look like beside those of step 0."""

    consistency: float
    shape: float
    entropy: float
    reading: MaskStats


def loss_terms(
    network: nn.Module, images_BCHW: Tensor, config: AdaptationConfig, seed: int
) -> tuple[Terms, Tensor]:
    """The loss of one batch, with gradient, and the probabilities [B, K, H, W] of the images as they are.

    Two forwards: one of the images, one of their perturbed view; a third where dropout makes a second look
    at the same images differ (1.4, the reference loop's o, o1 and o2). All randomness comes from `seed`.
    """
    weights = config.weights
    generator = torch.Generator().manual_seed(seed)
    dropout = _reseed_dropout(network, seed)
    view = add_noise(images_BCHW, generator, config.noise)
    probabilities = torch.softmax(network(images_BCHW), dim=1)
    if weights.official:
        turned = RotFlip.draw(view, generator)
        disturbed = turned.undo(torch.softmax(network(turned.apply(view)), dim=1))
    else:
        disturbed = torch.softmax(network(view), dim=1)
    again = torch.softmax(network(images_BCHW), dim=1) if dropout else probabilities
    consistency = losses.consistency(disturbed, again)
    if weights.official:
        entropy, shape = losses.official_entropy(probabilities), losses.official_shape(probabilities)
    else:
        entropy = losses.entropy(probabilities)
        distance = losses.shape_range(*images_BCHW.shape[2:])
        # Where it counts for nothing it is measured but not learned from: its gradient costs as much again
        with torch.set_grad_enabled(weights.shape > 0 and torch.is_grad_enabled()):
            shape = losses.shape_distance(probabilities, distance)
    loss = weights.consistency * consistency + weights.shape * shape + weights.entropy * entropy
    return Terms(loss, consistency, shape, entropy), probabilities


def ceiling(weights: LossWeights, largest_batch: int, classes: int) -> float:
    """About the most the loss can be: consistency and normalised entropy are at most 1 each.

    The reference code's entropy is B / K times that.
    """
    return weights.consistency + weights.entropy * (largest_batch / classes if weights.official else 1)


def to_network_dtype(network: nn.Module, images: Tensor) -> Tensor:
    """The images where, and of the type in which, the network computes."""
    reference = next(network.parameters())
    return images.to(reference.device, reference.dtype)


@torch.no_grad()
def class_maps(network: nn.Module, batches: Sequence[Tensor], check_cancelled: CancelCheck) -> list[Tensor]:
    """The most probable class of every pixel, uint8 [B, H, W] on the CPU, for each batch."""
    network.eval()
    maps = []
    for images in batches:
        check_cancelled()
        maps.append(network(to_network_dtype(network, images)).argmax(dim=1).to("cpu", torch.uint8))
    return maps


@torch.no_grad()
def score(
    network: nn.Module,
    batches: Sequence[Tensor],
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
    for index, (images, masks) in enumerate(zip(batches, before, strict=True)):
        check_cancelled()
        terms, probabilities = loss_terms(
            network, to_network_dtype(network, images), config, seed_of(config.seed, "score", index)
        )
        overlap = overlap or MaskOverlap(probabilities.shape[1])
        overlap.add(probabilities.argmax(dim=1), masks)
        rows.append([term.item() for term in (terms.loss, terms.consistency, terms.shape, terms.entropy)])
        counts.append(len(images))
    assert overlap is not None  # there is at least one batch
    loss, consistency, shape, entropy = (
        sum(value * count for value, count in zip(column, counts, strict=True)) / sum(counts)
        for column in zip(*rows, strict=True)
    )
    most = ceiling(config.weights, max(counts), overlap.classes)
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
