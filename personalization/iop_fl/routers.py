"""Routers, which give the coefficients of a routed layer: direct or pooled.

Legend: B batch, C channels of the layer's input, E experts (K inside models and the global one).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from personalization.networks import initialise
from personalization.networks.capabilities import spatial_axes
from personalization.options.presets import Router

Init = Literal["uniform", "official"]

# Learning rates. A few logits per layer need a high rate; a router of two linear layers a low one.
ROUTING_RATES: Mapping[Router, float] = MappingProxyType({"direct": 0.1, "pooled": 1e-3})


class DirectCoefficients(nn.Module):
    """One logit per expert, shared by all images: r = softmax(logits), initially 1/E each (1.7).

    For K = 3 it has 4 numbers per layer, the pooled router thousands. It is the choice for few images.
    """

    def __init__(self, experts: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(experts, dtype=dtype))

    def forward(self, features_BC: Tensor) -> Tensor:  # noqa: ARG002
        """Return the coefficients [E], which sum to 1 and do not depend on the features."""
        return torch.softmax(self.logits, dim=0)


class PooledRouter(nn.Module):
    """Router of IOP-FL, Eq. 6: r = sigmoid(theta(psi(h))), psi the mean over pixels, theta two linear layers.

    Linear(C, 2C), dropout, Linear(2C, E), as in the authors' code: without a non-linearity in between, and
    with E independent sigmoids that need not sum to 1. `init="uniform"` starts at exactly r = 1/E for every
    input (second layer's weight 0, bias -ln K), "official" at PyTorch's defaults, r near 0.5. Both draw from
    `generator`, which also draws the dropout masks in train mode; reseed it to repeat them.
    """

    def __init__(
        self,
        channels: int,
        experts: int,
        init: Init,
        dropout: float,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        with torch.device("meta"):
            self.first = nn.Linear(channels, 2 * channels, dtype=dtype)
            self.second = nn.Linear(2 * channels, experts, dtype=dtype)
        self.to_empty(device="cpu")
        initialise(self, generator)
        if init == "uniform":
            nn.init.zeros_(self.second.weight)
            nn.init.constant_(self.second.bias, -math.log(experts - 1))
        self.dropout = dropout
        self.generator = generator

    def forward(self, features_BC: Tensor) -> Tensor:
        """Compute the coefficients [B, E] of each image, in (0, 1)."""
        hidden = self.first(features_BC.mean(dim=spatial_axes(features_BC)))
        if self.training and self.dropout:
            # functional.dropout draws from the global generator only
            drawn = torch.rand(hidden.shape, generator=self.generator, dtype=hidden.dtype)
            hidden = hidden * (drawn >= self.dropout).to(hidden) / (1 - self.dropout)
        return torch.sigmoid(self.second(hidden))
