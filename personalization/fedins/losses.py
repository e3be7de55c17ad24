"""Loss of FedIns at a site: the task's loss and the key-matching loss.

Legend: B batch, C selected entries.
"""

from __future__ import annotations

from torch import Tensor

from personalization.errors import StateError


def key_matching_loss(similarities_BC: Tensor) -> Tensor:
    """Compute 1 - s, with s the sum of an image's C similarities, averaged over images: in [1 - C, 1 + C].

    The paper does not print this term, but its public code has it. Without it keys get no gradient, because
    the selection of the most similar keys has none.
    """
    return 1 - similarities_BC.sum(dim=1).mean()


def fedins_loss(task_loss: Tensor, similarities_BC: Tensor, key_weight: float) -> Tensor:
    """Compute (1 - w) L_task + w (1 - s) with w = `key_weight`, which is 0.1 in the public code.

    Raises StateError for a weight outside [0, 1].
    """
    if not 0 <= key_weight <= 1:
        raise StateError(f"key_weight: expected 0..1, found {key_weight}")
    return (1 - key_weight) * task_loss + key_weight * key_matching_loss(similarities_BC)
