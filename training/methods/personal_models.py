"""Methods with a model per site: how a site chooses the one that it publishes, and how it leaves the site.

A site validates its model in every round on its own patients. It keeps the best one (the earlier of equals),
or the last one (`selection: last`), and sends it in the phase `export` if it consents. Sites may so publish
models of different rounds.

In `PersonalFedAvg` (`personal_parts.py`) a part of the model is averaged and the other part is the site's.
In `FullPersonalFedAvg` a site has a whole model of its own beside the global one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn
from typing_extensions import override

from model_store.task import Task
from personalization.state import clone
from training.algorithm import (
    ClientResult,
    Memory,
    Plan,
    Publication,
    State,
    StepContext,
)
from training.errors import SiteFailed
from training.local.networks import network_of, shapes_of
from training.local.scores import AnySiteData, ValidationScore, evaluate, weight_of
from training.methods.fedavg import SCORES, WEIGHTS, FedAvg, FedAvgConfig
from training.parts.export import PERSONAL, export_personal, export_phase, personal_drafts
from training.parts.test import Predict, predicting, score_once, scoring_phase
from training.state_tree import join, part

_CHOSEN = "chosen"
# Any later model replaces one with this mark: see `RandomisationConfig.selectable`.
_TOO_EARLY = "too_early"


class PersonalModels(FedAvg):
    """FedAvg with the choice and the export of a model per site."""

    def __init__(self, config: FedAvgConfig, task: Task) -> None:
        super().__init__(config, task)
        self.published_metric = self.metric
        self.personal_metric = f"personal_{self.metric}"

    def expect_whole(self, server: Memory) -> Mapping[str, State]:
        """An exported model is a whole network."""
        return {PERSONAL.name: shapes_of(self.network)}

    def choose(self, memory: Memory, model: State, score: ValidationScore, rounds_done: int) -> Memory:
        """The site's memory with its model after so many rounds, if that is the one to publish so far."""
        chosen = memory.facts.get(_CHOSEN)
        keeps_best = self.config.selection == "best" and not (chosen and chosen.get(_TOO_EARLY))
        if chosen and keeps_best and not score.beats(ValidationScore.noted(chosen)):
            return memory
        early = {} if self.config.selectable(rounds_done) else {_TOO_EARLY: True}
        facts = {**memory.facts, _CHOSEN: {**score.facts(), **early}}
        return Memory({**memory.tensors, **join({_CHOSEN: clone(model)})}, facts)

    def predict_chosen(self, context: StepContext, memory: Memory) -> Predict | None:
        """The answers of the chosen model; None at a site that never trained."""
        if _CHOSEN not in memory.facts:
            return None
        network = network_of(self.network, part(memory.tensors, _CHOSEN), context.device)
        return predicting(network, self.config.batch_size)

    def export_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Send the chosen model. Raises SiteFailed at a site that never trained."""
        if _CHOSEN not in memory.facts:
            raise SiteFailed("it has no personal model: it took part in no round of training")
        score = ValidationScore.noted(memory.facts[_CHOSEN])
        return export_personal(part(memory.tensors, _CHOSEN), score, self.personal_metric)


@dataclass(frozen=True)
class LocalResult:
    """What a site has after a round: the weights that it shares, its own model, the mean loss, and the
    tensors and facts from which it goes on. With `afresh`, its earlier models are not compared with."""

    shared: State
    personal: State
    loss: float
    kept: Memory = field(default_factory=Memory)
    afresh: bool = False


class FullPersonalFedAvg(PersonalModels):
    """FedAvg in which every site has a whole model of its own beside the global one.

    Both are validated in every round, and chosen apart: the global one by all sites, a site's by the site.
    """

    @abstractmethod
    def train_both(
        self, context: StepContext, network: nn.Module, memory: Memory, data: AnySiteData
    ) -> LocalResult:
        """Train from `network`, which holds w_g; it may be changed in place. `memory` has the tensors and
        facts of the last `LocalResult.kept`, and is empty in a site's first round."""

    @override
    def plan(self) -> Plan:
        """FedAvg's plan, with each site's own model tested beside the global one, and the export."""
        *before, _ = super().plan()
        test = scoring_phase(self.task, (WEIGHTS,), self.score_step, self.send_selected, ("", "personal"))
        return (*before, test, export_phase(self.export_step, self.expect_whole))

    @override
    def score_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Score the selected w_g and the site's own model on the test patients."""
        network = network_of(self.network, received[WEIGHTS.name], context.device)
        shared, own = predicting(network, self.config.batch_size), self.predict_chosen(context, memory)
        return score_once({"": shared, "personal": own}, data, self.task)

    @override
    def train_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Validate and train w_g as in FedAvg, and the site's own model beside it."""
        network = self.network_here(context, received[WEIGHTS.name], data)
        score = evaluate(network, data.val, self.classes, self.config.batch_size)
        found = self.train_both(context, network, memory, data)
        own = network_of(self.network, found.personal, context.device)
        own_score = evaluate(own, data.val, self.classes, self.config.batch_size)
        before = Memory() if found.afresh else memory
        chosen = self.choose(before, found.personal, own_score, context.round + 1)
        kept = Memory(
            {**join({_CHOSEN: part(chosen.tensors, _CHOSEN)}), **found.kept.tensors},
            {_CHOSEN: chosen.facts[_CHOSEN], **found.kept.facts},
        )
        return ClientResult(
            {WEIGHTS.name: found.shared, SCORES.name: score.state()},
            weight_of(data, self.config.aggregation),
            kept,
            {
                **score.metrics(self.metric),
                **own_score.metrics(self.personal_metric),
                "loss": found.loss,
            },
        )

    @override
    def publication(self, server: Memory) -> Publication:
        """The exported models beside the global one; without consent, the global model alone."""
        base = super().publication(server)
        own = personal_drafts(server, self.network, self.task, self.published_metric)
        return replace(base, kind="personal-models", models=(*base.models, *own)) if own else base
