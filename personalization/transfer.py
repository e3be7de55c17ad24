"""Copies between the CPU, where data are kept and all numbers are drawn, and the device that computes."""

from __future__ import annotations

import torch
from torch import Tensor

CPU = torch.device("cpu")


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. The host does not wait for a copy to a GPU, since it is from pinned memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
