"""FedSoup: Chen et al., FedSoup: Improving Generalization and Personalization in Federated Learning via
Selective Model Interpolation, MICCAI 2023.

FedAvg, in which a site k interpolates what it has trained with global models of several rounds (a soup). In
the last rounds, those after the share alpha of all, the site keeps the mean P_k of n_k global models. After
local training of w_k from w_g, two candidates are compared on its own validation patients (Section 2.2):

    u = (w_k + n_k P_k) / (n_k + 1)                  without the round's global model
    u' = (w_k + n_k P_k + w_g) / (n_k + 2)           with it

If u' is better, w_g joins the pool: P_k <- (n_k P_k + w_g) / (n_k + 1), n_k <- n_k + 1. The better candidate
is the site's personal model, and what the site sends for the average. Before, w_k is both; a site that was in
a round with a pool publishes one of these.

The means are over parameters, as in the authors' code. Batch norm keeps the running statistics of w_k's
training there; here those of both candidates are estimated on the site's training slices, so that their
scores differ by the soup alone, unless `statistics` is `averaged`. The code also compares on the site's test
images, counts the rounds that the site took part in, and its Adam goes on over the rounds.

Shared:  what FedAvg shares, with the better candidate for weights; once, the scores of the personal model on
         test and validation patients. In the phase `export`, and only at sites that consent: the personal
         model and its score.
Stays:   P_k and n_k; the personal model's score until then; what stays in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field
from torch import nn
from typing_extensions import override

from model_store.task import Task
from training.algorithm import State, StepContext
from training.choices.fedavg import FedAvgConfig
from training.local.networks import network_of, parameter_names, state_of
from training.local.norms import estimate_statistics
from training.local.scores import ValidationScore, evaluate
from training.local.site import SiteData
from training.methods.personal_models import FullPersonalFedAvg, LocalResult
from training.methods.registry import register
from training.parts.part import Slot
from training.parts.train import SiteRound


class FedSoupConfig(FedAvgConfig):
    """What FedSoup takes beside FedAvg's."""

    soup_start: float = Field(
        0.75, ge=0, lt=1, description="alpha: share of the rounds after which sites pool global models"
    )


@dataclass(frozen=True)
class Pool:
    """P_k and n_k; `count` is 0 while no global model has joined."""

    mean: State = field(default_factory=dict)
    count: int = 0


@register("fedsoup", FedSoupConfig, kinds=("segmentation", "classification"))
class FedSoup(FullPersonalFedAvg):
    """FedAvg of models that sites interpolate with a pool of global ones."""

    pool = Slot("pool", Pool())

    def __init__(self, config: FedSoupConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: FedSoupConfig = config
        self._trained = parameter_names(self.network)

    @override
    def train_both(self, network: nn.Module, here: SiteRound) -> LocalResult:
        """FedAvg's training; in the last rounds, the better candidate and the pool after it."""
        context, memory, data = here.context, here.memory, here.data
        received = state_of(network)
        loss = self.fit(network, here)
        trained = state_of(network)
        if context.round + 1 <= self.config.soup_start * context.rounds:
            return LocalResult(trained, trained, loss, memory)
        w_g = {name: received[name] for name in self._trained}
        before = self.pool.read(memory)
        pool, count = before.mean, before.count
        without, score = self._candidate(context, trained, pool, count, data)
        widened = mean_with(pool, count, w_g)
        with_, its_score = self._candidate(context, trained, widened, count + 1, data)
        # NaN, the mean over no patients, is no improvement.
        better = its_score.mean > score.mean
        if better:
            pool, count = widened, count + 1
        soup = with_ if better else without
        kept = self.pool.write(memory, Pool(pool, count))
        return LocalResult(soup, soup, loss, kept, afresh=not self.pool.holds(memory))

    def _candidate(
        self, context: StepContext, trained: State, pool: State, count: int, data: SiteData
    ) -> tuple[State, ValidationScore]:
        """(w_k + n P) / (n + 1), and its score on the site's validation patients."""
        own = {name: trained[name] for name in self._trained}
        state = {**trained, **mean_with(pool, count, own)}
        network = network_of(self.network, state, context.device)
        if self.config.statistics == "estimated":
            estimate_statistics(network, data.all_train, self.config.batch_size)
            state = state_of(network)
        return state, evaluate(network, data.val, self.classes, self.config.batch_size)


def mean_with(mean: State, count: int, another: State) -> State:
    """The mean of `count` states, with one more."""
    if not count:
        return another
    return {name: tensor + (another[name] - tensor) / (count + 1) for name, tensor in mean.items()}
