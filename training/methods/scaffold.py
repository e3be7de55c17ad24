"""SCAFFOLD: Karimireddy et al., Stochastic Controlled Averaging for Federated Learning, ICML 2020.

Each site k has a control variate c_k, an estimate of its own gradient, and the server has their mean c. A
site corrects every local step by the difference, so that sites with unlike data drift apart less (Alg. 1):

    w_k <- w_k - eta_l (g_k(w_k) - c_k + c)                          S steps from w_g
    c_k+ = c_k - c + (w_g - w_k) / (S eta_l)                         option II: mean of S gradients
    w_g <- sum_k (n_k / n) w_k                                       with eta_g = 1
    c   <- c + sum_k (n_k / n_all) (c_k+ - c_k)                      the paper's means are uniform

with all c at 0 first, so that round 1 is FedAvg's. The sums are over the sites of the round, n is theirs.
NIID-Bench's code moves c by the round's mean change, without the paper's share of the sites that took part.
Option II needs plain SGD, so there is no momentum and no Adam. Batch-norm statistics have no control: they
are averaged, as in FedAvg.

Shared:  what FedAvg shares, and the change of c_k and the mean c, as large as the weights.
Stays:   c_k; what stays in FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn, stack, zeros_like
from typing_extensions import override

from model_store.task import Task
from training.algorithm import Group, Memory, RoundResult, State, StepContext
from training.choices.fedavg import FedAvgConfig
from training.local.loop import train_locally
from training.local.networks import parameter_names, state_of
from training.local.schedule import Schedule
from training.methods.fedavg import FedAvg
from training.methods.registry import register
from training.parts.part import Slot
from training.parts.train import WEIGHTS, SiteRound, Update

CONTROL = Group("control", "weights", "mean")
# It has another name than what was sent, because clips and norms compare an upload with what was sent.
CHANGE = Group("control_change", "weights", "mean")
_C, _WEIGHT = "control", "weight"


# What suits where every step is plain SGD.
SUITED_TO_SGD = {
    kind: {name: value for name, value in suited.items() if name not in ("optimiser", "learning_rate")}
    for kind, suited in FedAvgConfig.SUITED.items()
}


class ScaffoldConfig(FedAvgConfig):
    """What SCAFFOLD takes beside FedAvg's."""

    optimiser: Literal["sgd"] = Field("sgd", description="plain, without momentum")
    learning_rate: float = Field(0.1, gt=0, description="eta_l, in the first half of the rounds")

    SUITED: ClassVar[Mapping[str, Mapping[str, Any]]] = SUITED_TO_SGD


@dataclass(frozen=True)
class Control:
    """c at the server, c_k at a site; empty at a site before its first round, where it is 0."""

    variate: State = field(default_factory=dict)


@register("scaffold", ScaffoldConfig, kinds=("segmentation", "classification"))
class Scaffold(FedAvg):
    """FedAvg with local steps that control variates correct."""

    downloads = (CONTROL,)
    uploads = (CHANGE,)
    control = Slot("control", Control())
    while_training = (control,)

    def __init__(self, config: ScaffoldConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: ScaffoldConfig = config
        self._trained = parameter_names(self.network)

    @override
    def initial(self, context: StepContext) -> Memory:
        server = super().initial(context)
        w_g = self.train.slot.read(server).w_g
        return self.control.write(server, Control({name: zeros_like(w_g[name]) for name in self._trained}))

    @override
    def send_beside(self, server: Memory) -> Mapping[str, State]:
        """c."""
        return {CONTROL.name: self.control.read(server).variate}

    @override
    def expect_beside(self, server: Memory) -> Mapping[str, State]:
        """A change is as large as c, and begins at 0."""
        variate = self.control.read(server).variate
        return {CHANGE.name: {name: zeros_like(tensor) for name, tensor in variate.items()}}

    @override
    def update(self, network: nn.Module, here: SiteRound) -> Update:
        """FedAvg's update with corrected gradients, and the change of c_k."""
        w_g, mean = here.received[WEIGHTS.name], here.received[CONTROL.name]
        own = self.control.read(here.memory).variate or {name: zeros_like(c) for name, c in mean.items()}
        correction = Correction(network, {name: mean[name] - own[name] for name in self._trained})
        schedule, draw = self.schedule(here.context.round), here.context.generator("train")
        loss = train_locally(network, here.data.train, schedule, draw, correction)
        after = state_of(network)
        length = correction.steps * schedule.learning_rate
        change = {name: (w_g[name] - after[name]) / length - mean[name] for name in self._trained}
        kept = Control({name: own[name] + change[name] for name in self._trained})
        return Update(after, loss, {CHANGE.name: change}, self.control.write(here.memory, kept))

    @override
    def schedule(self, round_: int) -> Schedule:
        return replace(super().schedule(round_), momentum=0.0)

    @override
    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """FedAvg's step; c moves by the share of all sites that was there."""
        share = self.describe.share(server, result)
        change = result.reduced[CHANGE.name]
        before = self.control.read(server).variate
        mean = Control({name: c + share * change[name] for name, c in before.items()})
        return self.control.write(super().average(context, server, result), mean)


class Correction:
    """A term of value 0 and gradient c - c_k, which counts the batches that it is added to."""

    def __init__(self, network: nn.Module, difference: Mapping[str, Tensor]) -> None:
        self._weights = dict(network.named_parameters())
        self._difference = {name: d.to(self._weights[name].device) for name, d in difference.items()}
        self.steps = 0

    def __call__(self) -> Tensor:
        """Return <c - c_k, w>, less its value."""
        self.steps += 1
        parts = [(d * self._weights[name]).sum() for name, d in self._difference.items()]
        term = stack(parts).sum()
        return term - term.detach()
