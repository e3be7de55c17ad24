"""Preset `sar` (Niu et al., ICLR 2023): minimise entropy at flat minima, of pixels that are sure already.

    at w:                pixels with an entropy below 0.4 ln K; the gradient g of their mean entropy
    at w + rho g/|g|:    of these, the pixels still below it; the gradient of their mean entropy
    one step along the second gradient, from w

rho = 0.05, over batch norm's scale and shift. The step is SGD's with momentum in the paper and Adam's here,
as in all presets. Adaptation ends where the safety limits say so, in place of the paper's reset.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import Batch, Objective, Terms
from personalization.test_time.recipe import Routing

# Share of the largest entropy above which a pixel is left out, and the radius in which the worst is sought.
MARGIN = 0.4
RADIUS = 0.05


class Sar(Objective):
    """Sharpness-aware and reliable entropy, of pixels as in segmentation."""

    @override
    def terms(self, network: nn.Module, batch: Batch, config: AdaptationConfig, seed: int) -> Terms:
        logits = network(batch.images)
        entropy = _entropies(logits)
        loss = _mean_where(entropy, entropy < MARGIN)
        return Terms(loss, torch.softmax(logits, dim=1), None, None, entropy.mean())

    @override
    def ceiling(self, config: AdaptationConfig, largest_batch: int, classes: int) -> float:
        return MARGIN

    @override
    def step(
        self,
        network: nn.Module,
        batch: Batch,
        config: AdaptationConfig,
        optimiser: torch.optim.Optimizer,
        seed: int,
    ) -> float:
        learned = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        entropy = _entropies(network(batch.images))
        reliable = entropy.detach() < MARGIN
        loss = _mean_where(entropy, reliable)
        gradient = torch.autograd.grad(loss, learned)
        norm = torch.stack(torch._foreach_norm(gradient)).norm()
        before = [parameter.detach().clone() for parameter in learned]
        with torch.no_grad():
            climb = torch._foreach_div(torch._foreach_mul(gradient, RADIUS), norm + 1e-12)
            torch._foreach_add_(learned, climb)
        climbed = _entropies(network(batch.images))
        worst = _mean_where(climbed, reliable & (climbed.detach() < MARGIN))
        found = torch.autograd.grad(worst, learned)
        with torch.no_grad():
            torch._foreach_copy_(learned, before)
            for parameter, part in zip(learned, found, strict=True):
                parameter.grad = part
        finite = torch.isfinite(torch.cat([part.flatten() for part in found])).all()
        # Read together: each reading waits for a GPU.
        value, steps = torch.stack([loss.detach(), finite.to(loss.dtype)]).tolist()
        if math.isfinite(value) and steps:
            optimiser.step()
        return float(value)


def _entropies(logits_BKHW: Tensor) -> Tensor:
    """Entropy [B, H, W] of every pixel, as a share of the largest."""
    logs = torch.log_softmax(logits_BKHW, dim=1)
    return -(logs.exp() * logs).sum(dim=1) / math.log(logits_BKHW.shape[1])


def _mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of the chosen values; 0, with no gradient, of none."""
    return (values * chosen).sum() / chosen.sum().clamp(min=1)


RECIPE = Routing(Sar())
