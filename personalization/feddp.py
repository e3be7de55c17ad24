"""Inconsistency-guided calibration (FedDP, Wang et al., TMI 2023).

Legend: M models, B batch, H and W height and width. Logits are z [B, 1, H, W]; targets are 0 or 1, [B, H, W].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

SMOOTHING = 1e-5
Scope = Literal["image", "batch"]


def inconsistency(probabilities_MB1HW: Tensor, scope: Scope = "image") -> Tensor:
    """U [B, 1, H, W]: the standard deviation over the models, divided by its maximum of the image.

    With `scope="batch"` the maximum is that of all images, as in the authors' code. Where all models agree, U
    is 0.
    """
    deviation = probabilities_MB1HW.std(dim=0)
    axes = (1, 2, 3) if scope == "image" else (0, 1, 2, 3)
    most = deviation.amax(dim=axes, keepdim=True)
    return deviation / torch.where(most > 0, most, torch.ones_like(most))


def dice_loss(logits_B1HW: Tensor, target_BHW: Tensor) -> Tensor:
    """1 - (2 sum(p g) + 1e-5) / (sum p + sum g + 1e-5), sums over the whole batch, p = sigmoid(z)."""
    probability, truth = torch.sigmoid(logits_B1HW), target_BHW.unsqueeze(1).to(logits_B1HW.dtype)
    overlap = (probability * truth).sum()
    return 1 - (2 * overlap + SMOOTHING) / (probability.sum() + truth.sum() + SMOOTHING)


def calibration_loss(
    logits_B1HW: Tensor, target_BHW: Tensor, inconsistency_B1HW: Tensor, weight: float
) -> Tensor:
    """Dice + lambda mean(U BCE): pixels on which the sites' models differ count more."""
    truth = target_BHW.unsqueeze(1).to(logits_B1HW.dtype)
    entropy = functional.binary_cross_entropy_with_logits(logits_B1HW, truth, reduction="none")
    return dice_loss(logits_B1HW, target_BHW) + weight * (inconsistency_B1HW * entropy).mean()
