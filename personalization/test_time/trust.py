"""How far two gradients agree (GraTa, Chen et al., AAAI 2025)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def loss_and_trust(loss: Tensor, first: Sequence[Tensor], second: Sequence[Tensor]) -> tuple[float, float]:
    """A loss, and (1 + cos)^2 / 4 of the angle between two gradients: 1 where they agree, 0 where they are
    opposed. Both are read together, since each reading waits for a GPU."""
    one, other = (torch.cat([part.flatten() for part in gradient]) for gradient in (first, second))
    cosine = torch.nn.functional.cosine_similarity(one, other, dim=0)
    value, agreement = torch.stack([loss.detach(), cosine]).tolist()
    return value, (1 + agreement) ** 2 / 4
