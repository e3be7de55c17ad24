"""How a pool is used: whether images spread over its keys or crowd on a few.

Legend: M entries, N images, C picked entries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def usage_of(entries_NC: Tensor, count: int) -> Tensor:
    """How often each of `count` entries was picked, int64 [M]."""
    return torch.bincount(entries_NC.flatten().cpu(), minlength=count)


def key_entropy(usage_M: Tensor) -> float:
    """Entropy of the shares, over its greatest value ln M: 1 when all entries are picked alike, 0 when one
    takes all, or where there is one entry or no pick."""
    total = float(usage_M.sum())
    if len(usage_M) < 2 or not total:
        return 0.0
    shares = usage_M[usage_M > 0].double() / total
    return float(-(shares * shares.log()).sum()) / math.log(len(usage_M))


def unused(usage_M: Tensor) -> int:
    """How many entries nobody picked: dead keys."""
    return int((usage_M == 0).sum())
