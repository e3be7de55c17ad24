"""How far two gradients agree (GraTa, Chen et al., AAAI 2025)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def trust(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """(1 + cos)^2 / 4 of the angle between two gradients: 1 where they agree, 0 where they are opposed."""
    one, other = (torch.cat([part.flatten() for part in gradient]) for gradient in (first, second))
    cosine = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
    return (1 + cosine) ** 2 / 4
