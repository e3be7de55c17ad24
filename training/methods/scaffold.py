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
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn, stack, zeros_like
from typing_extensions import override

from model_store.task import Task
from training.algorithm import ClientResult, Group, Memory, Phase, RoundResult, State, StepContext
from training.local.loop import train_locally
from training.local.networks import network_of, parameter_names, state_of
from training.local.schedule import Schedule
from training.local.scores import AnySiteData, evaluate, weight_of
from training.methods.fedavg import SCORES, WEIGHTS, FedAvg, FedAvgConfig
from training.methods.registry import register
from training.state_tree import join, part

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


@register("scaffold", ScaffoldConfig, kinds=("segmentation", "classification"))
class Scaffold(FedAvg):
    """FedAvg with local steps that control variates correct."""

    def __init__(self, config: ScaffoldConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: ScaffoldConfig = config
        self._trained = parameter_names(self.network)

    @override
    def train_phase(self) -> Phase:
        """FedAvg's phase; the controls travel beside the weights."""
        return replace(
            super().train_phase(),
            downloads=(WEIGHTS, CONTROL),
            uploads=(WEIGHTS, CHANGE, SCORES),
            broadcast=self.send_control,
            expected=self.expect_change,
        )

    @override
    def initial(self, context: StepContext) -> Memory:
        drawn = super().initial(context).tensors
        weights = part(drawn, "global")
        return Memory({**drawn, **join({_C: {name: zeros_like(weights[name]) for name in self._trained}})})

    def send_control(self, server: Memory, site: str) -> Mapping[str, State]:
        """w_g and c."""
        return {**self.send_global(server, site), CONTROL.name: part(server.tensors, _C)}

    def expect_change(self, server: Memory) -> Mapping[str, State]:
        """A change is as large as c, and begins at 0."""
        return {CHANGE.name: {name: zeros_like(t) for name, t in part(server.tensors, _C).items()}}

    @override
    def train_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """FedAvg's step with corrected gradients, and the change of c_k."""
        network = network_of(self.network, received[WEIGHTS.name], context.device)
        score = evaluate(network, data.val, self.classes, self.config.batch_size)
        mean = received[CONTROL.name]
        own = part(memory.tensors, _C) or {name: zeros_like(tensor) for name, tensor in mean.items()}
        correction = Correction(network, {name: mean[name] - own[name] for name in self._trained})
        schedule = self.schedule(context.round)
        loss = train_locally(network, data.train, schedule, context.generator("train"), correction)
        after = state_of(network)
        length = correction.steps * schedule.learning_rate
        change = {
            name: (received[WEIGHTS.name][name] - after[name]) / length - mean[name] for name in self._trained
        }
        kept = {name: own[name] + change[name] for name in self._trained}
        return ClientResult(
            {WEIGHTS.name: after, CHANGE.name: change, SCORES.name: score.state()},
            weight_of(data, self.config.aggregation),
            Memory(join({_C: kept})),
            {**score.metrics(self.metric), "loss": loss},
        )

    @override
    def schedule(self, round_: int) -> Schedule:
        return replace(super().schedule(round_), momentum=0.0)

    @override
    def note_described(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the weight of all sites beside what they describe."""
        after = super().note_described(context, server, result)
        return Memory(after.tensors, {**after.facts, _WEIGHT: sum(result.weights.values())})

    @override
    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        after = super().average(context, server, result)
        here = sum(result.weights.values())
        share = here / max(here, server.facts[_WEIGHT])
        change = result.reduced[CHANGE.name]
        mean = {name: c + share * change[name] for name, c in part(server.tensors, _C).items()}
        return Memory({**after.tensors, **join({_C: mean})}, after.facts)


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
