"""pFedMe: Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020.

A site k minimises the Moreau envelope of its loss in place of the loss. Its personal model is the theta at
which the envelope takes its value (Eq. 2 and 3):

    F_k(w) = min_theta L_k(theta) + lambda / 2 ||theta - w||^2               theta_k(w) is that theta

grad F_k(w) is lambda (w - theta_k(w)). From w_k = theta_k = w_g a site takes for every batch (Alg. 1)

    theta_k <- theta_k - eta_theta grad (L_k(theta_k) + lambda / 2 ||theta_k - w_k||^2)       K steps
    w_k <- w_k - eta lambda (w_k - theta_k)

and the server, with w_k from the sites of the round,

    w_g <- (1 - beta) w_g + beta sum_k (n_k / n) w_k                     (so the code; the paper: uniform)

eta lambda, the share of the way that w_k goes, is one number here (`step_share`). The steps on theta are
those of `optimiser`; the paper's, plain SGD, are `sgd`. The paper's values, for small networks on MNIST, are
lambda 15, eta lambda 0.075 and eta_theta 0.05 to 0.1. The authors' code also decays theta, by 0.001
(`decay`).

Batch norm's statistics of w_k are estimated on the site's training slices, because the steps are theta's.
With `statistics: averaged` w_k has theta's. Where beta is not 1, the mean of the sites' statistics is not
that of w_g, and a site estimates w_g's on its slices before it scores it.

Shared:  what FedAvg shares, with w_k for weights; once, theta_k's scores on test and validation patients. In
         the phase `export`, and only at sites that consent: theta_k and its score.
Stays:   theta_k until then; what stays in FedAvg.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from model_store.task import Task
from training.algorithm import Memory, RoundResult, State, StepContext
from training.choices.fedavg import FedAvgConfig
from training.local.loop import mean_loss, new_optimiser, scheduled_batches, take_step
from training.local.networks import network_of, parameter_names, state_of
from training.local.norms import estimate_statistics, least_batch, with_statistics
from training.local.schedule import Schedule
from training.local.site import SiteData
from training.methods.fedprox import proximal_term
from training.methods.personal_models import FullPersonalFedAvg, LocalResult
from training.methods.registry import register
from training.parts.train import WEIGHTS, SiteRound


class PFedMeConfig(FedAvgConfig):
    """What pFedMe takes beside FedAvg's. `optimiser` and `learning_rate` are those of the steps on theta."""

    attraction: float = Field(0.1, gt=0, description="lambda, which holds theta near the site's w")
    personal_steps: int = Field(5, ge=1, description="K, steps on theta for every batch")
    step_share: float = Field(
        0.5, gt=0, le=1, description="eta lambda: share of the way to theta that w goes after every batch"
    )
    decay: float = Field(0.0, ge=0, description="weight decay of the steps on theta")
    server_rate: float = Field(1.0, gt=0, description="beta: how far the server goes to the sites' mean")

    @model_validator(mode="after")
    def _statistics_follow(self) -> PFedMeConfig:
        if self.server_rate > 1 and self.statistics == "averaged":
            raise ValueError(
                "server_rate: expected at most 1 with statistics: averaged, which are those of the sites' "
                f"mean, found {self.server_rate:g}; use statistics: estimated"
            )
        return self


@register("pfedme", PFedMeConfig, kinds=("segmentation", "classification"))
class PFedMe(FullPersonalFedAvg):
    """FedAvg on the sites' Moreau envelopes."""

    def __init__(self, config: PFedMeConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: PFedMeConfig = config
        self._trained = parameter_names(self.network)

    @override
    def network_here(self, context: StepContext, w_g: State, data: SiteData) -> nn.Module:
        """FedAvg's network, with this site's statistics where w_g is not the mean."""
        config = self.config
        if config.server_rate != 1 and config.statistics == "estimated":
            w_g = with_statistics(self.network, w_g, data.all_train, config.batch_size, context.device)
        return super().network_here(context, w_g, data)

    @override
    def train_both(self, network: nn.Module, here: SiteRound) -> LocalResult:
        """theta, and w in `network`. The loss is theta's, with the distance, over all its steps."""
        context, data = here.context, here.data
        config, schedule = self.config, self.schedule(context.round)
        theta = network_of(self.network, state_of(network), context.device)
        least = least_batch(theta, data.train, schedule.batch_size)
        theta.train()
        optimiser = new_optimiser(theta, schedule)
        losses: list[Tensor] = []
        draw = context.generator("train")
        for batch in scheduled_batches(data.train, schedule, draw, least, context.device):
            nearness = proximal_term(theta, config.attraction, anchor=network)
            for _ in range(config.personal_steps):
                losses.append(take_step(theta, optimiser, batch, schedule, nearness))
            with torch.no_grad():
                for w, own in zip(network.parameters(), theta.parameters(), strict=True):
                    w.lerp_(own, config.step_share)
        personal = state_of(theta)
        if config.statistics == "estimated":
            estimate_statistics(network, data.all_train, config.batch_size)
            shared = state_of(network)
        else:
            after = state_of(network)
            shared = {**personal, **{name: after[name] for name in self._trained}}
        return LocalResult(shared, personal, mean_loss(losses), here.memory)

    @override
    def schedule(self, round_: int) -> Schedule:
        return replace(super().schedule(round_), momentum=0.0, weight_decay=self.config.decay)

    @override
    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """FedAvg's step, only part of the way to the mean."""
        w_g, mean, beta = (
            self.train.slot.read(server).w_g,
            result.reduced[WEIGHTS.name],
            self.config.server_rate,
        )
        if beta == 1:
            return self.train.moved(server, mean)
        moved = {name: w_g[name] + beta * (mean[name] - w_g[name]) for name in self._trained}
        return self.train.moved(server, {**mean, **moved})
