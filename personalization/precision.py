"""In what numbers a network's products are taken while it is trained."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# Of the products in a network's forward and backward; weights, batch norm's statistics, losses and the
# optimiser are float32 always.
Precision = Literal["float32", "bfloat16"]


def mixed_precision(precision: Precision, device: torch.device) -> torch.autocast:
    """A context for forward passes. What comes out may be bfloat16: `widened` before a loss."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def to_float32(tensor: Tensor) -> Tensor:
    """float32 for bfloat16, and anything else as it is."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
