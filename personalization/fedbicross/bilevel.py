"""Stage 2c: learn w, the weights of the clusters in a student's distillation, through one student step.

Inner step (plain SGD):   G^t = G^(t-1) - eta_G sum_j w_j g_j,   g_j = grad_G L_KD(G^(t-1); x_j^train)
Outer step:               w <- Proj_simplex(w - eta_w dL_val(G^t)/dw)

G^t is linear in w, so by the chain rule dL_val/dw_j = -eta_G <grad L_val(G^t), g_j>. This is exact for one
step of plain SGD with batch norm in one mode, and needs no second derivatives. The inner step needs the g_j
anyway. With several inner steps it is the derivative through the last one.

Legend: J sources (clusters).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

Gradient = list[Tensor]
OuterScaling = Literal["normalised", "plain"]


def project_onto_simplex(point_J: Tensor) -> Tensor:
    """Find the nearest point with entries >= 0 that sum to 1 (Duchi et al., 2008; sorting, O(J log J))."""
    descending = point_J.sort(descending=True).values
    excess = descending.cumsum(0) - 1
    counts = torch.arange(1, len(point_J) + 1, dtype=point_J.dtype, device=point_J.device)
    support = int((descending - excess / counts > 0).sum())
    return (point_J - excess[support - 1] / support).clamp(min=0)


def gradient_of(loss: Tensor, network: nn.Module) -> Gradient:
    """Compute d loss / d parameters, one tensor each; zeros if the loss does not depend on a parameter."""
    parameters = list(network.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, found, strict=True)
    ]


@torch.no_grad()
def inner_step(network: nn.Module, gradients: Sequence[Gradient], mixing_J: Tensor, rate: float) -> None:
    """Apply G <- G - eta_G sum_j w_j g_j, in place."""
    for gradient, weight in zip(gradients, mixing_J.tolist(), strict=True):
        for parameter, direction in zip(network.parameters(), gradient, strict=True):
            parameter.sub_(direction, alpha=rate * weight)


def outer_gradient(validation: Gradient, gradients: Sequence[Gradient], rate: float) -> Tensor:
    """Compute dL_val/dw [J] float64: -eta_G <v, g_j>, with v the gradient of the validation loss at G^t."""
    products = [
        torch.stack(
            [(a.double() * b.double()).sum() for a, b in zip(validation, gradient, strict=True)]
        ).sum()
        for gradient in gradients
    ]
    return -rate * torch.stack(products).cpu()


def outer_step(
    mixing_J: Tensor, gradient_J: Tensor, rate: float, scaling: OuterScaling = "normalised"
) -> Tensor:
    """Compute the new w [J] float64.

    `normalised` subtracts the mean of the gradient, which the projection ignores anyway, and scales the rest
    to a largest entry of 1: an outer step then moves w by at most eta_w, whatever the sizes of the losses and
    of eta_G, of which the gradient is a multiple. `plain` is the paper as printed, with steps that these
    decide.
    """
    direction = gradient_J
    if scaling == "normalised":
        direction = gradient_J - gradient_J.mean()
        largest = float(direction.abs().max())
        # Equal gradients leave only rounding errors, which give no direction.
        if largest <= 1e-12 * float(gradient_J.abs().max()) or largest == 0:
            return mixing_J
        direction = direction / largest
    return project_onto_simplex(mixing_J - rate * direction)


def stratified_steps(steps: int, strata: int, generator: torch.Generator) -> frozenset[int]:
    """Draw one step, 1..T, uniformly from each of S equal strata of the trajectory; S <= T.

    Stratum s has the steps floor(s T / S) + 1 … floor((s + 1) T / S).
    """
    if not 1 <= strata <= steps:
        raise ValueError(f"expected 1 to {steps} strata of {steps} steps, found {strata}")
    bounds = [s * steps // strata for s in range(strata + 1)]
    return frozenset(
        low + 1 + int(torch.randint(high - low, (1,), generator=generator)) for low, high in pairwise(bounds)
    )
