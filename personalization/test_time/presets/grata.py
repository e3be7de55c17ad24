"""Preset `grata` (Chen et al., AAAI 2025): a step along consistency, as long as entropy agrees.

From scale and shift of batch norm w: the gradient g of the entropy at w; the gradient h of the consistency
at w - g; then one step of Adam along h from w, at the rate times (1 + cos(g, h))^2 / 4. Consistency is the
binary cross-entropy between the answer to a strong view, here through drawn scanners, and the mean answer to
the image, its two flips and its turns by 90, 180 and 270 degrees; of an oblong image, by 180 alone. A volume
is flipped and turned in the plane of its last two axes, a signal flipped along its only one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.networks.capabilities import spatial_axes
from personalization.scanner import augment_intensities
from personalization.test_time import losses
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import Batch, Objective, Terms
from personalization.test_time.recipe import Routing
from personalization.test_time.trust import loss_and_trust

SEVERITY = 2.0


class GraTa(Objective):
    """Entropy as the auxiliary gradient, consistency as the one that is followed."""

    @override
    def terms(self, network: nn.Module, batch: Batch, config: AdaptationConfig, seed: int) -> Terms:
        probabilities = torch.softmax(network(batch.images), dim=1)
        consistency = self._consistency(network, batch.images, seed)
        return Terms(consistency, probabilities, consistency, None, losses.entropy(probabilities))

    @override
    def ceiling(self, config: AdaptationConfig, largest_batch: int, classes: int) -> float:
        return math.log(2)

    @override
    def step(
        self,
        network: nn.Module,
        batch: Batch,
        config: AdaptationConfig,
        optimiser: torch.optim.Optimizer,
        seed: int,
    ) -> float:
        groups = optimiser.param_groups
        learned = [parameter for group in groups for parameter in group["params"]]
        entropy = losses.entropy(torch.softmax(network(batch.images), dim=1))
        auxiliary = torch.autograd.grad(entropy, learned)
        before = [parameter.detach().clone() for parameter in learned]
        with torch.no_grad():
            torch._foreach_sub_(learned, auxiliary)
        consistency = self._consistency(network, batch.images, seed)
        gradient = torch.autograd.grad(consistency, learned)
        with torch.no_grad():
            torch._foreach_copy_(learned, before)
            for parameter, own in zip(learned, gradient, strict=True):
                parameter.grad = own
        value, factor = loss_and_trust(consistency, auxiliary, gradient)
        if not math.isfinite(value):
            return value
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= factor
        optimiser.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return value

    def _consistency(self, network: nn.Module, images_BCHW: Tensor, seed: int) -> Tensor:
        """Binary cross-entropy of the strong view's answer with the weak views' mean, which is fixed."""
        with torch.no_grad():
            answers = [torch.softmax(network(images_BCHW), dim=1)]
            plane = spatial_axes(images_BCHW)[-2:]
            for axes in dict.fromkeys((plane[:1], plane[-1:], plane)):
                answers.append(torch.softmax(network(images_BCHW.flip(axes)), dim=1).flip(axes))
            if len(plane) > 1 and images_BCHW.shape[-2] == images_BCHW.shape[-1]:
                for turns in (1, -1):
                    turned = torch.softmax(network(images_BCHW.rot90(turns, plane)), dim=1)
                    answers.append(turned.rot90(-turns, plane))
            wanted = torch.stack(answers).mean(dim=0)
        generator = torch.Generator().manual_seed(seed)
        strong = augment_intensities(images_BCHW, SEVERITY, generator).to(images_BCHW)
        found = torch.softmax(network(strong), dim=1).clamp(1e-6, 1 - 1e-6)
        return torch.nn.functional.binary_cross_entropy(found, wanted.clamp(0, 1))


RECIPE = Routing(GraTa())
