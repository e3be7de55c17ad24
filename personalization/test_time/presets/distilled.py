"""Preset `distilled`: what all models of the federation say together, learned by one of them.

The teacher is the mean of the probabilities of every model of the space, with its own statistics and with
those of the ladder (`ladder.ensemble`). It is fixed, so that errors do not feed on themselves. The student
starts as the ladder's global model and learns, of every view T x of the scans,

    L = 1 - softDice(p(T x), T q) + CE(p(T x), T q)

by all its weights, at the ladder's statistics. T turns, flips and sends the scans through drawn scanners.

Legend: B images of a batch, K classes, N images.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.augmentation import Augmentation, transform_images
from personalization.cancellation import CancelCheck
from personalization.iop_fl.layers import fix_statistics
from personalization.iop_fl.space import RoutingSpace
from personalization.networks.capabilities import moving_norms
from personalization.scanner import augment_intensities
from personalization.test_time.adapt import Learning
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import blended, ensemble
from personalization.test_time.losses import soft_cross_entropy, soft_dice_distance
from personalization.test_time.objective import Batch, Objective, Terms, answers_to
from personalization.test_time.recipe import Recipe

RATE = 1e-4
# Severity of the drawn scanners that a view goes through.
SEVERITY = 1.0


class Distillation(Objective):
    """Soft Dice and cross-entropy with a teacher's answers [N, K, H, W] to the cohort's images."""

    def __init__(self, teacher_NKHW: Tensor) -> None:
        self._teacher = teacher_NKHW

    @override
    def terms(self, network: nn.Module, batch: Batch, config: AdaptationConfig, seed: int) -> Terms:
        images, wanted = batch.images, answers_to(batch, self._teacher)
        if torch.is_grad_enabled():
            images, wanted = _view(images, wanted, torch.Generator().manual_seed(seed))
        logits = network(images)
        loss = soft_dice_distance(torch.softmax(logits, dim=1), wanted) + soft_cross_entropy(logits, wanted)
        return Terms(loss, torch.softmax(logits, dim=1))

    @override
    def ceiling(self, config: AdaptationConfig, largest_batch: int, classes: int) -> float:
        # Soft Dice is at most 1; cross-entropy has no bound
        return 1.0


def _view(images_BCHW: Tensor, answers_BKHW: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images and answers, turned and flipped alike; the images also as other scanners show them."""
    drawn = Augmentation().draw(len(images_BCHW), generator)
    turned = transform_images(torch.cat([images_BCHW, answers_BKHW], dim=1), *drawn)
    images, answers = torch.split(turned, [images_BCHW.shape[1], answers_BKHW.shape[1]], dim=1)
    seen = augment_intensities(images, SEVERITY, generator)
    return seen.to(images_BCHW), (answers / answers.sum(dim=1, keepdim=True)).to(answers_BKHW)


class Distilled(Recipe):
    """The federation's models in one. Three forward passes of every model, then an epoch's training each."""

    @override
    def learning(
        self,
        space: RoutingSpace,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> Learning:
        """The ladder's global model, all weights of which are learned."""
        teacher = ensemble(space, images_NCHW, config.ladder, check_cancelled)
        network = space.plain().to(images_NCHW.device)
        if moving_norms(network):
            blended(network, images_NCHW, config.ladder, check_cancelled)
        fix_statistics(network)
        groups = ((list(network.parameters()), RATE),)
        return Learning(network, groups, Distillation(teacher), {"teacher": teacher})

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


RECIPE = Distilled()
