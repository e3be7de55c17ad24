"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

FedAvg with another local loss: a site's weights w are held near the global w_g that the round began with
(Eq. 2), so that sites with unlike data drift apart less:

    h_k(w; w_g) = L_k(w) + mu / 2 ||w - w_g||^2

The sum is over all parameters. Batch-norm statistics are no parameters and have no such term. With mu = 0
the method is FedAvg. The paper's other idea, fewer local epochs at slow sites, is not used.

Shared:  what FedAvg shares.
Stays:   what stays in FedAvg.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from model_store.task import Task
from training.choices.fedavg import FedAvgConfig
from training.local.loop import Penalty
from training.methods.fedavg import FedAvg
from training.methods.registry import register


class FedProxConfig(FedAvgConfig):
    """What FedProx takes beside FedAvg's. The paper tunes mu among 0.001, 0.01, 0.1 and 1."""

    mu: float = Field(0.01, ge=0, description="weight of the proximal term; 0 is FedAvg")


@register("fedprox", FedProxConfig, kinds=("segmentation", "classification"))
class FedProx(FedAvg):
    """FedAvg with the proximal term."""

    def __init__(self, config: FedProxConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: FedProxConfig = config

    @override
    def penalty(self, network: nn.Module) -> Penalty:
        return proximal_term(network, self.config.mu)


def proximal_term(network: nn.Module, mu: float, anchor: nn.Module | None = None) -> Penalty:
    """mu / 2 times the squared distance of the parameters from those that `anchor`, or else the network
    itself, has now."""
    weights = list(network.parameters())
    there = [w.detach().clone() for w in (anchor or network).parameters()]

    def term() -> Tensor:
        squares = (((w - w_g) ** 2).sum() for w, w_g in zip(weights, there, strict=True))
        return mu / 2 * sum(squares, start=there[0].new_zeros(()))

    return term
