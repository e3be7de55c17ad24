"""Mixed-precision training (float32 or bfloat16 autocast)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# Precision of the products in a network's forward and backward pass. Weights, batch-norm statistics, losses
# and the optimiser are always float32.
Precision = Literal["float32", "bfloat16"]


def mixed_precision(precision: Precision, device: torch.device) -> torch.autocast:
    """Create the context for forward passes. Outputs may be bfloat16: use `to_float32` before a loss."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def to_float32(tensor: Tensor) -> Tensor:
    """Convert bfloat16 to float32; other types are unchanged."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
