"""Co-Boosting's steps: Dai et al., Enhancing One-Shot Federated Learning Through Data and Ensemble
Co-Boosting, ICLR 2024.

The ensemble A_w(x) = sum_k w_k f_k(x) has a weight per member, 1/K at first. Images and weights improve each
other (Section 3):

    hard samples     L_G = (1 - p) CE(A_w(x), y) - b KL(A_w(x) || S(x)) at temperature 3, x = G(z);
                     p is the probability of y, of which no gradient is taken
    ensemble         w <- clip(w - mu sign(grad_w CE(A_w(x), y)), 0, 1)
    diversified      x <- x + e sign(grad_x <u, softmax(A_w(x) / 4)>),  u uniform in -1..1

The authors' code (rong-dai/Co-Boosting) divides A_w by the sum of w: `normalised`.

Legend: B batch, C channels, H and W height and width, K classes, M members.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from personalization.fedbicross.distillation import divergence
from personalization.precision import to_float32

ADVERSARIAL_TEMPERATURE = 3.0
TEMPERATURE = 4.0


def members_logits(members: Sequence[nn.Module], images_BCHW: Tensor) -> Tensor:
    """Compute f_k(x), [B, M, K], with running statistics."""
    return torch.stack([to_float32(member.eval()(images_BCHW)) for member in members], dim=1)


def weighted(logits_BMK: Tensor, weights_M: Tensor, normalised: bool = False) -> Tensor:
    """Compute A_w, [B, K], from the members' logits."""
    weights = weights_M.to(logits_BMK)
    together = torch.einsum("bmk,m->bk", logits_BMK, weights)
    return together / weights.sum() if normalised else together


def hard_cross_entropy(ensemble_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Compute the mean of (1 - p) CE: images of which the ensemble is not sure count more."""
    entropies_B = functional.cross_entropy(ensemble_BK, labels_B, reduction="none")
    return ((1 - (-entropies_B.detach()).exp()) * entropies_B).mean()


def generator_loss(ensemble_BK: Tensor, student_BK: Tensor, labels_B: Tensor, adversarial: float) -> Tensor:
    """Compute L_G; `adversarial` is b."""
    apart = divergence(student_BK, ensemble_BK, ADVERSARIAL_TEMPERATURE)
    return hard_cross_entropy(ensemble_BK, labels_B) - adversarial * apart


def boosted(
    weights_M: Tensor, logits_BMK: Tensor, labels_B: Tensor, rate: float, normalised: bool = False
) -> Tensor:
    """Take a step of w, float64; returns the new w [M]. Weights that would all become 0 stay as they are."""
    weights = weights_M.detach().clone().requires_grad_()
    loss = functional.cross_entropy(weighted(logits_BMK.double(), weights, normalised), labels_B)
    (slope,) = torch.autograd.grad(loss, weights)
    moved = (weights_M - rate * slope.sign()).clamp(0.0, 1.0)
    return moved if bool(moved.any()) else weights_M


def diversified(
    members: Sequence[nn.Module],
    images_BCHW: Tensor,
    weights_M: Tensor,
    direction_BK: Tensor,
    size: float,
    normalised: bool = False,
) -> Tensor:
    """Move each image by `size` per pixel, so that the ensemble's soft answer goes in its `direction`."""
    images = images_BCHW.detach().requires_grad_()
    answers = weighted(members_logits(members, images), weights_M, normalised)
    projected = (direction_BK * functional.softmax(answers / TEMPERATURE, dim=1)).sum()
    (slope,) = torch.autograd.grad(projected, images)
    return (images + size * slope.sign()).detach()
