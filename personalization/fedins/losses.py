"""What FedIns minimises at a site. Legend: B batch, C picked entries."""

from __future__ import annotations

from torch import Tensor

from personalization.errors import StateError


def key_matching_loss(similarities_BC: Tensor) -> Tensor:
    """1 - s, s being the sum of an image's C similarities, averaged over the images: in [1 - C, 1 + C].

    The paper does not print this term; its public code has it. Without it keys get no gradient, because the
    choice of the most similar ones has none.
    """
    return 1 - similarities_BC.sum(dim=1).mean()


def fedins_loss(task_loss: Tensor, similarities_BC: Tensor, key_weight: float) -> Tensor:
    """(1 - w) L_task + w (1 - s), w = `key_weight`; 0.1 in the public code.

    Raises StateError for a weight outside [0, 1].
    """
    if not 0 <= key_weight <= 1:
        raise StateError(f"key_weight: expected 0..1, found {key_weight}")
    return (1 - key_weight) * task_loss + key_weight * key_matching_loss(similarities_BC)
