"""Preset `anchored`: few routing coefficients, held by what the federation knows.

One coefficient per model and stage of the network, not per layer, starting near the global model:

    L = C + 0.1 H + KL(mean p || tau) + 0.1 ||c - c_0||^2

C is 1 - soft Dice between the answer to a noisy image and the ensemble's to the image as it is, which is
fixed. It is scale free, so that a small target that is lost costs as much as a large one. H is the entropy,
half of it within the target found (InTEnt). tau are the shares of the classes that the ensemble finds, drawn
towards the federation's size of the target (`anchor`), over the cohort and not per image, so that images
without a target are allowed (Bateson et al., Medical Image Analysis 2022); minimising entropy alone makes
targets smaller. A step is shortened by (1 + cos)^2 / 4 where
the gradients of C and H disagree (GraTa, Chen et al., AAAI 2025).

Legend: B images of a batch, K classes, E models, N images.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.cancellation import CancelCheck
from personalization.iop_fl.layers import fix_statistics
from personalization.iop_fl.merge import merged_weights
from personalization.iop_fl.network import route, routed_layers
from personalization.iop_fl.routers import DirectCoefficients
from personalization.iop_fl.space import RoutingSpace
from personalization.networks.capabilities import batch_norms, moving_norms, spatial_axes
from personalization.test_time import losses
from personalization.test_time.adapt import Learning
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import blended, ensemble
from personalization.test_time.objective import Batch, Objective, Terms, answers_to
from personalization.test_time.perturb import add_noise
from personalization.test_time.recipe import Recipe
from personalization.test_time.safety import SafetyLimits
from personalization.test_time.trust import loss_and_trust

# Share of the experts together at the start; the global model has the rest.
EXPERTS = 0.3
ENTROPY, PULL = 0.1, 0.1
STAGES = 5
RATE = 0.01
# Weight of the federation's size of the target, as a number of images.
PRIOR_IMAGES = 20


class Anchored(Objective):
    """The loss above, with a teacher's answers [N, K, H, W] to the cohort's images.

    `share` is the share of the pixels that are a target at the federation's members; None: not known.
    """

    def __init__(self, teacher_NKHW: Tensor, start: tuple[Tensor, ...], share: float | None = None) -> None:
        self._teacher = teacher_NKHW
        self._ratio = anchor(
            teacher_NKHW.mean(dim=(0, *spatial_axes(teacher_NKHW))), len(teacher_NKHW), share
        )
        self._start = start

    @override
    def terms(self, network: nn.Module, batch: Batch, config: AdaptationConfig, seed: int) -> Terms:
        agreement, held, probabilities = self._parts(network, batch, config, seed)
        entropy = losses.balanced_entropy(probabilities)
        return Terms(agreement + held + ENTROPY * entropy, probabilities, agreement, None, entropy)

    @override
    def ceiling(self, config: AdaptationConfig, largest_batch: int, classes: int) -> float:
        # Agreement and entropy are at most 1 each; the divergence has no bound
        return 1 + ENTROPY

    @override
    def step(
        self,
        network: nn.Module,
        batch: Batch,
        config: AdaptationConfig,
        optimiser: torch.optim.Optimizer,
        seed: int,
    ) -> float:
        """One step of Adam along C, KL and the pull, with H, as long as C and H agree on where to go."""
        agreement, held, probabilities = self._parts(network, batch, config, seed)
        entropy = losses.balanced_entropy(probabilities)
        loss = agreement + held + ENTROPY * entropy
        learned = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        first = torch.autograd.grad(agreement, learned, retain_graph=True)
        second = torch.autograd.grad(entropy, learned, retain_graph=True)
        value, factor = loss_and_trust(loss, first, second)
        if not math.isfinite(value):
            return value
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        rates = [group["lr"] for group in optimiser.param_groups]
        for group in optimiser.param_groups:
            group["lr"] *= factor
        optimiser.step()
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate
        return value

    def _parts(
        self, network: nn.Module, batch: Batch, config: AdaptationConfig, seed: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """C, KL with the pull, and the probabilities."""
        probabilities = torch.softmax(network(batch.images), dim=1)
        noisy = add_noise(batch.images, torch.Generator().manual_seed(seed), config.noise)
        wanted = answers_to(batch, self._teacher)
        agreement = losses.soft_dice_distance(torch.softmax(network(noisy), dim=1), wanted)
        self._ratio = self._ratio.to(probabilities)
        divergence = losses.ratio_divergence(probabilities, self._ratio)
        pull = sum(
            (logits - start.to(logits)).square().sum()
            for logits, start in zip(_logits(network), self._start, strict=True)
        )
        return agreement, divergence + PULL * pull, probabilities


def anchor(ratio_K: Tensor, images: int, share: float | None) -> Tensor:
    """The classes' shares, with the target's size between what is found here and the federation's.

        log t = (N log t_0 + M log t_fed) / (N + M)        N images, M = 20

    Hospitals differ in what they scan, so the federation's size enters softly.
    """
    found = float(1 - ratio_K[0])
    if not share or not found:
        return ratio_K
    logarithm = (images * math.log(found) + PRIOR_IMAGES * math.log(share)) / (images + PRIOR_IMAGES)
    targets = ratio_K[1:] * (math.exp(logarithm) / found)
    return torch.cat([1 - targets.sum(dim=0, keepdim=True), targets])


def _by_stages(space: RoutingSpace) -> nn.Module:
    """A routed network with shared coefficients in each fifth of its layers, near the global model."""
    network = route(space)
    experts = len(space.names) - 1
    shares = [EXPERTS / experts] * experts + [1 - EXPERTS] if experts else [1.0]
    layers = list(routed_layers(network).values())
    stages = [DirectCoefficients(len(shares), layers[0].experts.dtype) for _ in range(STAGES)]
    for stage in stages:
        stage.logits.data.copy_(torch.tensor(shares).log())
    for index, layer in enumerate(layers):
        layer.router = stages[STAGES * index // len(layers)]
    return network


def _logits(network: nn.Module) -> list[nn.Parameter]:
    """The coefficients' logits, one tensor per stage, in the order of the stages."""
    found = {id(p): p for layer in routed_layers(network).values() for p in layer.router.parameters()}
    return list(found.values())


class AnchoredRouting(Recipe):
    """Routing by stages, at the ladder's statistics."""

    # A target that grows or shrinks by more than a tenth is no refinement of what the ensemble finds.
    limits: ClassVar[SafetyLimits] = SafetyLimits(collapse=0.9, explosion=1.1)

    @override
    def learning(
        self,
        space: RoutingSpace,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> Learning:
        """The global model with a share of the experts, at the statistics of that mixture."""
        teacher = ensemble(space, images_NCHW, config.ladder, check_cancelled)
        network = _by_stages(space).to(images_NCHW.device)
        mixture = merged_weights(space, network, images_NCHW)
        _at_the_ladder(mixture, images_NCHW, config, check_cancelled)
        for name in batch_norms(network):
            network.set_submodule(name, mixture.get_submodule(name))
        fix_statistics(network)
        logits = _logits(network)
        start = tuple(value.detach().clone() for value in logits)
        rate = RATE if config.routing_rate is None else config.routing_rate
        objective = Anchored(teacher, start, config.target_share)
        return Learning(network, ((logits, rate),), objective, {"teacher": teacher})

    @override
    def merged(
        self,
        space: RoutingSpace,
        learned: nn.Module | None,
        images_NCHW: Tensor,
        config: AdaptationConfig,
        check_cancelled: CancelCheck,
    ) -> nn.Module:
        """Merged, with the ladder's statistics."""
        assert learned is not None
        network = merged_weights(space, learned, images_NCHW)
        return _at_the_ladder(network, images_NCHW, config, check_cancelled)


def _at_the_ladder(
    network: nn.Module, images_NCHW: Tensor, config: AdaptationConfig, check_cancelled: CancelCheck
) -> nn.Module:
    """The network, in place, at the ladder's statistics; unchanged without batch norm."""
    if not moving_norms(network):
        return network
    return blended(network, images_NCHW, config.ladder, check_cancelled)


RECIPE = AnchoredRouting()
