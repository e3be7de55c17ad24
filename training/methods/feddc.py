"""FedDC: Gao et al., FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction,
CVPR 2022.

Each site k keeps a drift h_k, how far its model has gone from the global one in all its rounds together. It
trains with a local loss that decouples the two, and sends both (Eq. 2 to 7, Alg. 1):

    F_k(w) = L_k(w) + alpha / 2 ||w + h_k - w_g||^2 + <w, (d_k - d) / (S eta_l)>
    w_k <- S steps on F_k from w_g,   d_k+ = w_k - w_g,   h_k <- h_k + d_k+
    w_g <- sum_k (n_k / n) (w_k + h_k),   d <- sum_k (n_k / n) d_k+

with all h and d at 0 first. d_k is the change of the site's last round, so that -d_k / (S eta_l) is the mean
of its gradients then, and S eta_l are the steps and the rate of that round: the last term is SCAFFOLD's
correction. A site without an earlier round has no last term. The paper's S and eta_l are constant. Sums are
over the sites of the round. The steps are plain SGD's, without momentum. Batch norm's statistics have no
drift: a site estimates those of the w_g that it receives on its own slices before it validates or trains, as
in FedAvgM.

`shared: sum` is for a server that may not know the drift: a site sends w_k + h_k as one. The server then
cannot know d, so the last term is left out. In a site's first round h_k is w_k - w_g, and the sum tells both.

`reading: code` is the authors' code (gaoliang13/FedDC at 13440c2) where it differs: the site's gradient is
SCAFFOLD's, g_k <- g_k - g - d_k+ / (S eta_l), of which g is the mean over all sites, drawn or not; and w_g
adds the mean drift of all sites to the mean w_k of the round, which the server knows without being sent a
drift. The code also weighs w_k plainly and g by n_k, and divides alpha and g by n_k K / n; here both means
have the sites' weights (`aggregation`), and terms are as printed. It clips gradients to the norm 10 (`clip`),
and has weight decay 0.001.

Shared:  what FedAvg shares; h_k and the mean d, each as large as the weights. With `shared: sum` w_k + h_k
         alone; with `reading: code` the change of g_k and the mean g in place of h_k and d.
Stays:   d_k, or g_k; with `shared: sum` h_k; what stays in FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor, zeros_like
from typing_extensions import override

from model_store.task import Task
from training.algorithm import ClientResult, Group, Memory, Phase, RoundResult, State, StepContext
from training.local.loop import train_locally
from training.local.networks import network_of, state_of
from training.local.schedule import Schedule
from training.local.scores import AnySiteData, evaluate, weight_of
from training.methods.fedavg import SCORES, WEIGHTS
from training.methods.fedprox import proximal_term
from training.methods.registry import register
from training.methods.scaffold import SUITED_TO_SGD, Correction
from training.methods.server_optimisers import MovedConfig, MovedFedAvg
from training.state_tree import join, part

DRIFT = Group("drift", "weights", "mean")
CHANGE = Group("change", "weights", "mean")
GRADIENT = Group("gradient", "weights", "mean")
# It has another name than what was sent, because clips and norms compare an upload with what was sent.
GRADIENT_CHANGE = Group("gradient_change", "weights", "mean")
_DRIFT, _CHANGE, _GRADIENT = DRIFT.name, CHANGE.name, GRADIENT.name
_LENGTH, _WEIGHT = "length", "weight"


class FedDcConfig(MovedConfig):
    """What FedDC takes beside FedAvg's. The paper's alpha is 0.005 to 0.1."""

    optimiser: Literal["sgd"] = Field("sgd", description="plain, without momentum")
    learning_rate: float = Field(0.1, gt=0, description="eta_l, in the first half of the rounds")
    alpha: float = Field(0.01, ge=0, description="weight of the term that holds w + h near w_g")
    shared: Literal["drift", "sum"] = Field(
        "drift", description="weights and drift, or their sum alone, at FedAvg's bytes"
    )
    reading: Literal["paper", "code"] = Field(
        "paper", description="the printed method, or the authors' code where it differs"
    )
    clip: float | None = Field(None, gt=0, description="norm to which gradients are clipped; 10 in the code")
    weight_decay: float = Field(0.0, ge=0, description="of the local optimiser")

    SUITED: ClassVar[Mapping[str, Mapping[str, Any]]] = SUITED_TO_SGD
    PAPER: ClassVar[Mapping[str, Any]] = {
        **MovedConfig.PAPER,
        "local_epochs": 5,
        "batch_size": 50,
        "weight_decay": 1e-3,
        "learning_rate_decay": 0.998,
    }

    @model_validator(mode="after")
    def _code_sends_no_drift(self) -> FedDcConfig:
        if self.reading == "code" and self.shared == "sum":
            raise ValueError(
                "shared: expected 'drift' with reading: code, which sends no drift of a site at all, found "
                "'sum'"
            )
        return self


@register("feddc", FedDcConfig, kinds=("segmentation", "classification"))
class FedDc(MovedFedAvg):
    """FedAvg with a drift per site, which the server adds."""

    def __init__(self, config: FedDcConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: FedDcConfig = config

    @property
    def _code(self) -> bool:
        return self.config.reading == "code"

    @property
    def _corrects(self) -> bool:
        return self.config.shared == "drift"

    @property
    def _sent(self) -> Group:
        """What sites receive beside w_g."""
        return GRADIENT if self._code else CHANGE

    @property
    def _upload(self) -> Group:
        """What they send beside w_k."""
        return GRADIENT_CHANGE if self._code else DRIFT

    @override
    def train_phase(self) -> Phase:
        """FedAvg's phase; the drift, and the mean change, travel beside the weights."""
        plain = super().train_phase()
        if not self._corrects:
            return plain
        return replace(
            plain,
            downloads=(WEIGHTS, self._sent),
            uploads=(WEIGHTS, self._upload, SCORES),
            broadcast=self.send_both,
            expected=self.expect_upload,
        )

    @override
    def initial(self, context: StepContext) -> Memory:
        drawn = super().initial(context).tensors
        names = [self._sent.name] if self._corrects else []
        names += [_DRIFT] if self._code else []
        none = self._none(part(drawn, "global"))
        return Memory({**drawn, **join(dict.fromkeys(names, none))})

    def _none(self, weights: State) -> State:
        return {name: zeros_like(weights[name]) for name in self.trained}

    def send_both(self, server: Memory, site: str) -> Mapping[str, State]:
        """w_g, and the mean change or gradient."""
        return {**self.send_global(server, site), self._sent.name: part(server.tensors, self._sent.name)}

    def expect_upload(self, server: Memory) -> Mapping[str, State]:
        """A drift, or the change of a gradient, is as large as the weights, and begins at 0."""
        return {self._upload.name: self._none(part(server.tensors, "global"))}

    @override
    def schedule(self, round_: int) -> Schedule:
        config = self.config
        return replace(
            super().schedule(round_), momentum=0.0, weight_decay=config.weight_decay, clip=config.clip
        )

    @override
    def train_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Validate w_g, train on F_k from it, and move the drift."""
        w_g, config = received[WEIGHTS.name], self.config
        network = self.network_here(context, w_g, data)
        score = evaluate(network, data.val, self.classes, config.batch_size)
        drift = part(memory.tensors, _DRIFT) or self._none(w_g)
        shifted = {name: w_g[name] - h for name, h in drift.items()}
        anchor = network_of(self.network, {**w_g, **shifted}, context.device)
        nearness = proximal_term(network, config.alpha, anchor=anchor)
        correction = Correction(network, self._difference(received, memory))
        schedule = self.schedule(context.round)

        def terms() -> Tensor:
            return correction() + nearness()

        loss = train_locally(network, data.train, schedule, context.generator("train"), terms)
        after = state_of(network)
        change = {name: after[name] - w_g[name] for name in self.trained}
        drift = {name: h + change[name] for name, h in drift.items()}
        kept, uploads = {_DRIFT: drift}, {WEIGHTS.name: after}
        length = correction.steps * schedule.learning_rate
        if not self._corrects:
            uploads = {WEIGHTS.name: {**after, **{name: after[name] + h for name, h in drift.items()}}}
        elif self._code:
            mean, own = received[_GRADIENT], part(memory.tensors, _GRADIENT) or self._none(w_g)
            kept[_GRADIENT] = {name: own[name] - mean[name] - change[name] / length for name in own}
            uploads[GRADIENT_CHANGE.name] = {name: g - own[name] for name, g in kept[_GRADIENT].items()}
        else:
            kept[_CHANGE] = change
            uploads[_DRIFT] = drift
        return ClientResult(
            {**uploads, SCORES.name: score.state()},
            weight_of(data, config.aggregation),
            Memory(join(kept), {_LENGTH: length}),
            {**score.metrics(self.metric), "loss": loss},
        )

    def _difference(self, received: Mapping[str, State], memory: Memory) -> State:
        """The gradient of the last term of F_k: 0 in a site's first round, and without a correction."""
        own = part(memory.tensors, self._sent.name)
        if not self._corrects or not (own or self._code):
            return self._none(received[WEIGHTS.name])
        mean = received[self._sent.name]
        if self._code:
            return {name: g - own[name] if own else g for name, g in mean.items()}
        length = memory.facts[_LENGTH]
        return {name: (own[name] - d) / length for name, d in mean.items()}

    @override
    def note_described(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the weight of all sites beside what they describe."""
        after = super().note_described(context, server, result)
        return Memory(after.tensors, {**after.facts, _WEIGHT: sum(result.weights.values())})

    @override
    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """FedAvg's step; add the mean drift."""
        after = super().average(context, server, result)
        if not self._corrects:
            return after
        before, mean = part(server.tensors, "global"), part(after.tensors, "global")
        change = {name: mean[name] - before[name] for name in self.trained}
        if self._code:
            here = sum(result.weights.values())
            share = here / max(here, server.facts[_WEIGHT])
            moved = result.reduced[GRADIENT_CHANGE.name]
            gradient = {name: g + share * moved[name] for name, g in part(server.tensors, _GRADIENT).items()}
            drift = {name: h + share * change[name] for name, h in part(server.tensors, _DRIFT).items()}
            kept = {_GRADIENT: gradient, _DRIFT: drift}
        else:
            drift = result.reduced[_DRIFT]
            kept = {_CHANGE: change}
        w_g = {name: tensor + drift[name] if name in drift else tensor for name, tensor in mean.items()}
        return Memory({**after.tensors, **join({**kept, "global": w_g})}, after.facts)
