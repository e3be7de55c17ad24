"""FedAvgM, FedAdagrad, FedAdam and FedYogi: FedAvg with an optimiser at the server.

FedAvgM: Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019 (Section 4). The others:
Reddi et al., Adaptive Federated Optimization, ICLR 2021 (Algorithm 2). The server takes the mean update for
a gradient. In round t, with w_k from the sites and every operation per weight:

    Delta = sum_k (n_k / n) w_k - w_g

    FedAvgM      m <- beta m + Delta                     w_g <- w_g + eta m

    the others   m <- beta_1 m + (1 - beta_1) Delta      w_g <- w_g + eta m / (sqrt(v) + tau)
    FedAdagrad   v <- v + Delta^2
    FedAdam      v <- beta_2 v + (1 - beta_2) Delta^2
    FedYogi      v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)

with m = 0 and v = tau^2 at first, and no bias correction, as in the paper. FedAvgM with eta = 1 and beta = 0
is FedAvg. The papers' sites take plain SGD steps; here they take FedAvg's (`optimiser`). Public code differs:
Flower begins with v = 0, and the authors' FedYogi corrects the bias of m and v.

The papers' networks have no batch norm. The sites' average of running statistics describes the average of
their weights, and the server's step goes elsewhere (FedAvgM on a phantom, same weights: Dice 0.35 with the
average, 0.46 with statistics of its own). So a site estimates the statistics of the w_g that it receives on
its own training slices, before it validates or trains (one pass without gradients per round), and those of
the published w_g are estimated at the end, as in FedAvg.

Shared:  what FedAvg shares. m and v stay at the server.
Stays:   what stays in FedAvg.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from model_store.task import Task
from training.algorithm import Memory, RoundResult, State, StepContext
from training.choices.fedavg import FedAvgConfig
from training.local.networks import parameter_names
from training.local.norms import moments_of, with_statistics
from training.local.site import SiteData
from training.methods.fedavg import FedAvg
from training.methods.registry import register
from training.parts.part import Slot
from training.parts.train import WEIGHTS


class MovedConfig(FedAvgConfig):
    """FedAvg's configuration, without averaged batch-norm statistics: see the module."""

    statistics: Literal["estimated"] = Field("estimated", description="the global model's batch norm")

    PAPER: ClassVar[Mapping[str, Any]] = {**FedAvgConfig.PAPER, "statistics": "estimated"}


class FedAvgMConfig(MovedConfig):
    """What FedAvgM takes beside FedAvg's."""

    server_rate: float = Field(1.0, gt=0, description="eta, of the server's step")
    server_momentum: float = Field(0.9, ge=0, lt=1, description="beta; 0 with server_rate 1 is FedAvg")


class AdaptiveConfig(MovedConfig):
    """What FedAdam and FedYogi take beside FedAvg's: the paper's values. The paper tunes eta."""

    server_rate: float = Field(0.01, gt=0, description="eta, of the server's step")
    beta_1: float = Field(0.9, ge=0, lt=1, description="decay of the mean of the updates")
    beta_2: float = Field(0.99, ge=0, lt=1, description="decay of the mean of their squares")
    tau: float = Field(1e-3, gt=0, description="adaptivity: the smaller, the more the step is normalised")


class FedAdagradConfig(AdaptiveConfig):
    """What FedAdagrad takes beside FedAvg's. It sums squares, so `beta_2` has no effect; no momentum, as in
    the paper's experiments."""

    beta_1: float = Field(0.0, ge=0, lt=1, description="decay of the mean of the updates")


class MovedFedAvg(FedAvg):
    """FedAvg in which w_g is not the sites' mean, so that batch norm's statistics have to be measured."""

    bare = True

    def __init__(self, config: MovedConfig, task: Task) -> None:
        super().__init__(config, task)
        self.trained = parameter_names(self.network)

    @override
    def network_here(self, context: StepContext, w_g: State, data: SiteData) -> nn.Module:
        """FedAvg's network, with batch-norm statistics of this site, if it has any."""
        if not moments_of(self.network):
            return super().network_here(context, w_g, data)
        size = self.config.batch_size
        own = with_statistics(self.network, w_g, data.all_train, size, context.device)
        return super().network_here(context, own, data)


@dataclass(frozen=True)
class Moments:
    """The moments of the server's optimiser, m and v, of each of w_g's tensors."""

    of: Mapping[str, State] = field(default_factory=dict)


class _ServerOptimised(MovedFedAvg):
    """FedAvg in which the server's step is an optimiser's."""

    moments = Slot("server_optimiser", Moments())
    while_training = (moments,)

    @abstractmethod
    def step(self, delta: Tensor, moments: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what is added to one of w_g's tensors, and its new moments; before the first step, `moments`
        is empty. All have the shape of `delta`."""

    @override
    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """The optimiser's step towards the mean. What is not trained is the mean's."""
        w_g, mean = self.train.slot.read(server).w_g, result.reduced[WEIGHTS.name]
        before, after = self.moments.read(server).of, dict[str, State]()
        moved = dict(mean)
        for name in self.trained:
            added, after[name] = self.step(mean[name] - w_g[name], before.get(name, {}))
            moved[name] = w_g[name] + added
        return self.moments.write(self.train.moved(server, moved), Moments(after))


@register("fedavgm", FedAvgMConfig, kinds=("segmentation", "classification"))
class FedAvgM(_ServerOptimised):
    """FedAvg with momentum at the server."""

    def __init__(self, config: FedAvgMConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: FedAvgMConfig = config

    @override
    def step(self, delta: Tensor, moments: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        m = self.config.server_momentum * moments["m"] + delta if moments else delta
        return self.config.server_rate * m, {"m": m}


class _Adaptive(_ServerOptimised):
    """A step that is divided by the root of a second moment."""

    def __init__(self, config: AdaptiveConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: AdaptiveConfig = config

    @abstractmethod
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the new v, from the old one and Delta^2."""

    @override
    def step(self, delta: Tensor, moments: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        m = config.beta_1 * moments["m"] if moments else torch.zeros_like(delta)
        m = m + (1 - config.beta_1) * delta
        v = self.second_moment(
            moments["v"] if moments else torch.full_like(delta, config.tau**2), delta.square()
        )
        return config.server_rate * m / (v.sqrt() + config.tau), {"m": m, "v": v}


@register("fedadagrad", FedAdagradConfig, kinds=("segmentation", "classification"))
class FedAdagrad(_Adaptive):
    """v sums squares."""

    @override
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@register("fedadam", AdaptiveConfig, kinds=("segmentation", "classification"))
class FedAdam(_Adaptive):
    """v is a moving average of squares."""

    @override
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.config.beta_2 * v + (1 - self.config.beta_2) * square


@register("fedyogi", AdaptiveConfig, kinds=("segmentation", "classification"))
class FedYogi(_Adaptive):
    """v moves towards Delta^2 by at most (1 - beta_2) Delta^2."""

    @override
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.config.beta_2) * square * (v - square).sign()
