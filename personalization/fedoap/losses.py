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
    """Compute L_s = 0.5 BCE + Dice for each sample, then the mean over samples.

    Dice = 1 - (2 sum(p g) + 1) / (sum p + sum g + 1), p = sigmoid(z). For a sample without tumour it is 0 if
    none is predicted. Raises LabelError for shapes that do not match, or values other than 0 and 1.
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
    """Compute FedOAP's perturbed boundary loss (1 - lambda) L_s(z, y) + lambda L_s(z + delta * eps, y).

    delta = 1[|y - sigmoid(z)| > threshold], detached, marks pixels that are confidently wrong (it does not
    select a boundary). eps is `noise`, with variance 0.1 in the paper. The noise is added to logits, because
    probabilities with noise would leave [0, 1]. One forward pass is enough for both terms. Raises LabelError
    as `binary_loss`.
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
    """Compute FedOAP's fine-tuning loss: the perturbed boundary loss with this noise variance, or a control.

    The control, L_s, draws no noise. The noise comes from `generator`, a CPU generator on every device.
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
