"""Imports for forked workers: every module that a job needs, none that reads the settings."""

from __future__ import annotations

import torch

import service.worker.routing_space
import service.worker.runner

# Creating the first optimiser imports a large part of torch.
torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])

__all__ = ["service"]
