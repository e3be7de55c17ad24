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
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor, nn, zeros_like
from typing_extensions import override

from model_store.task import Task
from training.algorithm import Group, Memory, RoundResult, State, StepContext
from training.local.loop import train_locally
from training.local.networks import network_of, state_of
from training.local.schedule import Schedule
from training.methods.fedprox import proximal_term
from training.methods.registry import register
from training.methods.scaffold import SUITED_TO_SGD, Correction
from training.methods.server_optimisers import MovedConfig, MovedFedAvg
from training.parts.part import Slot
from training.parts.train import WEIGHTS, SiteRound, Update

DRIFT = Group("drift", "weights", "mean")
CHANGE = Group("change", "weights", "mean")
GRADIENT = Group("gradient", "weights", "mean")
# It has another name than what was sent, because clips and norms compare an upload with what was sent.
GRADIENT_CHANGE = Group("gradient_change", "weights", "mean")


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


@dataclass(frozen=True)
class Kept:
    """What goes on from round to round, empty where it is 0 or not used.

    At the server, over the sites: the mean `change` d; by the code the mean `gradient` and `drift`. At a
    site: its last change d_k, or gradient g_k, its drift h_k, and the `length` S eta_l of its last round.
    """

    change: State = field(default_factory=dict)
    gradient: State = field(default_factory=dict)
    drift: State = field(default_factory=dict)
    length: float = 0.0


@register("feddc", FedDcConfig, kinds=("segmentation", "classification"))
class FedDc(MovedFedAvg):
    """FedAvg with a drift per site, which the server adds."""

    kept = Slot("drifts", Kept())
    while_training = (kept,)

    def __init__(self, config: FedDcConfig, task: Task) -> None:
        self._code = config.reading == "code"
        self._corrects = config.shared == "drift"
        if self._corrects:
            self.downloads = (GRADIENT if self._code else CHANGE,)
            self.uploads = (GRADIENT_CHANGE if self._code else DRIFT,)
        super().__init__(config, task)
        self.config: FedDcConfig = config

    @override
    def initial(self, context: StepContext) -> Memory:
        server = super().initial(context)
        none = self._none(self.train.slot.read(server).w_g)
        kept = Kept(gradient=none, drift=none) if self._code else Kept(change=none if self._corrects else {})
        return self.kept.write(server, kept)

    def _none(self, weights: State) -> State:
        return {name: zeros_like(weights[name]) for name in self.trained}

    @override
    def send_beside(self, server: Memory) -> Mapping[str, State]:
        """The mean change or gradient."""
        kept = self.kept.read(server)
        return {group.name: kept.gradient if self._code else kept.change for group in self.downloads}

    @override
    def expect_beside(self, server: Memory) -> Mapping[str, State]:
        """A drift, or the change of a gradient, is as large as the weights, and begins at 0."""
        w_g = self.train.slot.read(server).w_g
        return {group.name: self._none(w_g) for group in self.uploads}

    @override
    def schedule(self, round_: int) -> Schedule:
        config = self.config
        return replace(
            super().schedule(round_), momentum=0.0, weight_decay=config.weight_decay, clip=config.clip
        )

    @override
    def update(self, network: nn.Module, here: SiteRound) -> Update:
        """Train on F_k from w_g, and move the drift."""
        w_g, before = here.received[WEIGHTS.name], self.kept.read(here.memory)
        drift = before.drift or self._none(w_g)
        shifted = {name: w_g[name] - h for name, h in drift.items()}
        anchor = network_of(self.network, {**w_g, **shifted}, here.context.device)
        nearness = proximal_term(network, self.config.alpha, anchor=anchor)
        correction = Correction(network, self._difference(here.received, before))
        schedule, draw = self.schedule(here.context.round), here.context.generator("train")

        def terms() -> Tensor:
            return correction() + nearness()

        loss = train_locally(network, here.data.train, schedule, draw, terms)
        after = state_of(network)
        change = {name: after[name] - w_g[name] for name in self.trained}
        drift = {name: h + change[name] for name, h in drift.items()}
        length = correction.steps * schedule.learning_rate
        kept = Kept(drift=drift, length=length)
        if not self._corrects:
            sent = {**after, **{name: after[name] + h for name, h in drift.items()}}
            return Update(sent, loss, {}, self.kept.write(here.memory, kept))
        if self._code:
            mean, own = here.received[GRADIENT.name], before.gradient or self._none(w_g)
            gradient = {name: own[name] - mean[name] - change[name] / length for name in own}
            beside = {GRADIENT_CHANGE.name: {name: g - own[name] for name, g in gradient.items()}}
            kept = replace(kept, gradient=gradient)
        else:
            beside = {DRIFT.name: drift}
            kept = replace(kept, change=change)
        return Update(after, loss, beside, self.kept.write(here.memory, kept))

    def _difference(self, received: Mapping[str, State], own: Kept) -> State:
        """The gradient of the last term of F_k: 0 in a site's first round, and without a correction."""
        if self._code:
            mean = received[GRADIENT.name]
            return {name: g - own.gradient[name] if own.gradient else g for name, g in mean.items()}
        if not self._corrects or not own.change:
            return self._none(received[WEIGHTS.name])
        return {name: (own.change[name] - d) / own.length for name, d in received[CHANGE.name].items()}

    @override
    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """FedAvg's step; add the mean drift."""
        if not self._corrects:
            return super().average(context, server, result)
        w_g, mean = self.train.slot.read(server).w_g, result.reduced[WEIGHTS.name]
        before = self.kept.read(server)
        change = {name: mean[name] - w_g[name] for name in self.trained}
        if self._code:
            share, moved = self.describe.share(server, result), result.reduced[GRADIENT_CHANGE.name]
            gradient = {name: g + share * moved[name] for name, g in before.gradient.items()}
            drift = {name: h + share * change[name] for name, h in before.drift.items()}
            kept = Kept(gradient=gradient, drift=drift)
        else:
            drift, kept = result.reduced[DRIFT.name], Kept(change=change)
        next_ = {name: tensor + drift[name] if name in drift else tensor for name, tensor in mean.items()}
        return self.kept.write(self.train.moved(server, next_), kept)
