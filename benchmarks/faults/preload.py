"""Imported where workers are forked: everything that a job needs, but nothing that reads the settings."""

from __future__ import annotations

import torch

import service.worker.routing_space
import service.worker.runner

# The first optimiser imports a good part of torch.
torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])

__all__ = ["service"]
