"""Measure the use of a pool's keys: counts, entropy and dead keys.

Legend: M entries, N images, C selected entries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def usage_of(entries_NC: Tensor, count: int) -> Tensor:
    """Count how often each of `count` entries was selected, int64 [M]."""
    return torch.bincount(entries_NC.flatten().cpu(), minlength=count)


def key_entropy(usage_M: Tensor) -> float:
    """Compute the entropy of the shares, divided by its maximum ln M.

    1 if all entries are used equally; 0 if all images select one entry, or there is only one entry or no use.
    """
    total = float(usage_M.sum())
    if len(usage_M) < 2 or not total:
        return 0.0
    shares = usage_M[usage_M > 0].double() / total
    return float(-(shares * shares.log()).sum()) / math.log(len(usage_M))


def unused(usage_M: Tensor) -> int:
    """Count the dead keys: entries that no image selected."""
    return int((usage_M == 0).sum())
