"""Ditto: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.

Each site k has a personal model v_k beside the global w, which is FedAvg's. v_k is held near the w_g that the
round began with (Eq. 1), and never feeds back into w (Alg. 1):

    h_k(v_k; w_g) = L_k(v_k) + lambda / 2 ||v_k - w_g||^2
    v_k <- v_k - eta (grad L_k(v_k) + lambda (v_k - w_g))            v_k = the first w_g at first

With lambda = 0 the v_k are local-only models; a large lambda gives w_g. The sum is over all parameters; batch
norm's statistics are v_k's own. v_k takes as many steps as w_k. The paper's sites take plain SGD steps; here
they take FedAvg's (`optimiser`), with a fresh optimiser every round. The paper tunes lambda from 0.05 to 2.
v_k begins with the first w_g that the site receives; in the authors' code, with the run's first w_g.

Shared:  what FedAvg shares; once, v_k's scores on test and validation patients. In the phase `export`, and
         only at sites that consent: v_k and its score.
Stays:   v_k until then; what stays in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field
from torch import nn
from typing_extensions import override

from model_store.task import Task
from training.algorithm import State
from training.choices.fedavg import FedAvgConfig
from training.local.loop import train_locally
from training.local.networks import network_of, state_of
from training.methods.fedprox import proximal_term
from training.methods.personal_models import FullPersonalFedAvg, LocalResult
from training.methods.registry import register
from training.parts.part import Slot
from training.parts.train import SiteRound


class DittoConfig(FedAvgConfig):
    """What Ditto takes beside FedAvg's."""

    attraction: float = Field(
        0.1, ge=0, description="lambda, which holds a site's model near the global one; 0 is local-only"
    )


@dataclass(frozen=True)
class Personal:
    """v_k; empty before a site's first round."""

    model: State = field(default_factory=dict)


@register("ditto", DittoConfig, kinds=("segmentation", "classification"))
class Ditto(FullPersonalFedAvg):
    """FedAvg, and at every site a model that is held near the global one."""

    personal = Slot("personal", Personal())

    def __init__(self, config: DittoConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: DittoConfig = config

    @override
    def train_both(self, network: nn.Module, here: SiteRound) -> LocalResult:
        """FedAvg's training for w_k; that of v_k, with the proximal term. The loss is w_k's."""
        start = self.personal.read(here.memory).model or state_of(network)
        own = network_of(self.network, start, here.context.device)
        nearness = proximal_term(own, self.config.attraction, anchor=network)
        loss = self.fit(network, here)
        schedule, draw = self.schedule(here.context.round), here.context.generator("personal")
        train_locally(own, here.data.train, schedule, draw, nearness)
        v_k = state_of(own)
        return LocalResult(state_of(network), v_k, loss, self.personal.write(here.memory, Personal(v_k)))
