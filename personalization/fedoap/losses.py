"""Losses of binary segmentation: FedOAP's L_s (appendix G) and its perturbed boundary loss (Eq. 6-8).

Legend: B batch, H and W height and width. Logits are z [B, 1, H, W]; targets are 0 or 1, [B, H, W].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from personalization.errors import LabelError

SMOOTHING = 1.0


def binary_loss(logits_B1HW: Tensor, target_BHW: Tensor) -> Tensor:
    """L_s = 0.5 BCE + Dice, of each sample, then the mean over samples.

    Dice = 1 - (2 sum(p g) + 1) / (sum p + sum g + 1), p = sigmoid(z): a sample without tumour costs nothing
    where nothing is found. Raises LabelError for shapes that do not match, or another value than 0 and 1.
    """
    truth = _truth(logits_B1HW, target_BHW)
    entropy = functional.binary_cross_entropy_with_logits(logits_B1HW, truth, reduction="none")
    probability = torch.sigmoid(logits_B1HW)
    overlap = (probability * truth).flatten(1).sum(1)
    total = probability.flatten(1).sum(1) + truth.flatten(1).sum(1)
    dice = 1 - (2 * overlap + SMOOTHING) / (total + SMOOTHING)
    return (0.5 * entropy.flatten(1).mean(1) + dice).mean()


def perturbed_boundary_loss(
    logits_B1HW: Tensor,
    target_BHW: Tensor,
    noise_B1HW: Tensor,
    *,
    threshold: float = 0.75,
    trade_off: float = 0.1,
) -> Tensor:
    """(1 - lambda) L_s(z, y) + lambda L_s(z + delta * eps, y): FedOAP's perturbed boundary loss.

    delta = 1[|y - sigmoid(z)| > threshold], detached, marks pixels that are confidently wrong (nothing in it
    selects a boundary); eps is `noise`, of the paper's variance 0.1. The noise is added to logits: added to
    probabilities it would leave [0, 1]. One forward pass serves both terms. Raises LabelError as
    `binary_loss`.
    """
    truth = _truth(logits_B1HW, target_BHW)
    with torch.no_grad():
        wrong = ((truth - torch.sigmoid(logits_B1HW)).abs() > threshold).to(logits_B1HW.dtype)
    perturbed = logits_B1HW + wrong * noise_B1HW
    return (1 - trade_off) * binary_loss(logits_B1HW, target_BHW) + trade_off * binary_loss(
        perturbed, target_BHW
    )


def second_stage_loss(
    logits_B1HW: Tensor,
    target_BHW: Tensor,
    generator: torch.Generator,
    *,
    perturbed: bool = True,
    variance: float = 0.1,
    threshold: float = 0.75,
    trade_off: float = 0.1,
) -> Tensor:
    """FedOAP's loss of fine-tuning: the perturbed boundary loss with noise of `variance`, or its control.

    The control is L_s, and draws nothing. The noise comes from `generator`, a CPU's, whatever the device.
    Raises LabelError as `binary_loss`.
    """
    if not perturbed:
        return binary_loss(logits_B1HW, target_BHW)
    noise = math.sqrt(variance) * torch.randn(logits_B1HW.shape, generator=generator)
    return perturbed_boundary_loss(
        logits_B1HW, target_BHW, noise.to(logits_B1HW), threshold=threshold, trade_off=trade_off
    )


def _truth(logits: Tensor, target: Tensor) -> Tensor:
    expected = [logits.shape[0], *logits.shape[2:]]
    if logits.ndim != 4 or logits.shape[1] != 1 or list(target.shape) != expected:
        raise LabelError(
            f"expected logits [B, 1, H, W] and a target [B, H, W], found {list(logits.shape)} and "
            f"{list(target.shape)}"
        )
    if target.numel() and (int(target.min()) < 0 or int(target.max()) > 1):
        raise LabelError(f"target: expected 0 and 1, found {int(target.min())}..{int(target.max())}")
    return target.unsqueeze(1).to(logits.dtype)
