"""Methods in which every site has a whole model of its own beside the global one.

Both are validated in every round, and chosen apart: the global one by all sites, a site's by the site.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn
from typing_extensions import override

from model_store.task import Task
from training.algorithm import Memory, Publication, State, StepContext
from training.choices.fedavg import FedAvgConfig
from training.local.networks import network_of
from training.local.scores import evaluate
from training.methods.fedavg import FedAvg
from training.parts.export import Export
from training.parts.own import ChooseOwn
from training.parts.test import Model, Predict, Test
from training.parts.train import WEIGHTS, SiteRound, Update


@dataclass(frozen=True)
class LocalResult:
    """What a site has after a round: the weights that it shares, its own model, the mean loss, and the memory
    from which it goes on. With `afresh`, its earlier models are not compared with."""

    shared: State
    personal: State
    loss: float
    memory: Memory = field(default_factory=Memory)
    afresh: bool = False


class FullPersonalFedAvg(FedAvg):
    """FedAvg, and the choice and the export of a model per site."""

    def __init__(self, config: FedAvgConfig, task: Task) -> None:
        super().__init__(config, task)
        self.own = ChooseOwn(self)
        plain = self.test
        self.test = Test(task, self.answers, ("", "personal"), (WEIGHTS,), self.train.send_selected)
        self.own_metric = f"personal_{self.metric}"
        self.export = Export(
            self.own.exported, self.own.like, self.test, watched=self.own_metric, published=self.metric
        )
        self.exchange(plain, self.test, self.export)

    @abstractmethod
    def train_both(self, network: nn.Module, here: SiteRound) -> LocalResult:
        """Train from `network`, which holds w_g; it may be changed in place."""

    @override
    def update(self, network: nn.Module, here: SiteRound) -> Update:
        """Train both models, and choose the site's own."""
        found = self.train_both(network, here)
        own = network_of(self.network, found.personal, here.context.device)
        score = evaluate(own, here.data.val, self.classes, self.config.batch_size)
        before = self.own.slot.clear(found.memory) if found.afresh else found.memory
        kept = self.own.choose(before, found.personal, score, here.context.round + 1)
        return Update(found.shared, found.loss, memory=kept, metrics=score.metrics(self.own_metric))

    @override
    def answers(
        self, context: StepContext, received: Mapping[str, State], memory: Memory
    ) -> Mapping[Model, Predict | None]:
        """The models that a site tests: the selected w_g, and its own."""
        shared = super().answers(context, received, memory)
        return {**shared, "personal": self.own.answers(context, memory)}

    @override
    def made(self, server: Memory, metrics: Mapping[str, float]) -> Publication:
        """The exported models beside the global one; without consent, the global model alone."""
        base, own = super().made(server, metrics), self.export.drafts(server, self.network)
        return replace(base, kind="personal-models", models=(*base.models, *own)) if own else base
