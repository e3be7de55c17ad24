"""Methods in which a part of the network is averaged, and the other part stays at its site.

The model of a site after t rounds is the average of the shared parts after t rounds, joined to the site's
part of its last local training. The site validates it on its own patients when the next round begins, and
after the last round. There is no global model: no hospital has validated one part without the other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from typing_extensions import override

from model_store.task import Task
from training.algorithm import Memory, Publication, State, StepContext
from training.choices.fedavg import FedAvgConfig
from training.methods.fedavg import FedAvg
from training.parts.export import Export
from training.parts.judge import Judge
from training.parts.own import ChooseOwn
from training.parts.stays import TrainWhole, ValidateWhole
from training.parts.test import Model, Predict, Test


class PersonalFedAvg(FedAvg):
    """FedAvg of the tensors that are not a site's own."""

    def __init__(self, config: FedAvgConfig, task: Task) -> None:
        super().__init__(config, task)
        published, self.metric = self.metric, f"personal_{self.metric}"
        # A site draws its own part.
        config.check_reads_start()
        self.own = ChooseOwn(self)
        train = self.train = TrainWhole(self, self.own, self.is_own)
        self.test = Test(task, self.answers, ("personal",))
        self.export = Export(
            self.own.exported, self.own.like, self.test, watched=self.metric, published=published
        )
        validate, judge = ValidateWhole(train), Judge(train, self.own)
        self.parts = (self.describe, train, validate, judge, self.test, self.export)

    @abstractmethod
    def is_own(self, name: str) -> bool:
        """Whether a tensor of the network's state stays at its site."""

    @override
    def answers(
        self, context: StepContext, received: Mapping[str, State], memory: Memory
    ) -> Mapping[Model, Predict | None]:
        """The model that a site tests: its own."""
        return {"personal": self.own.answers(context, memory)}

    @override
    def made(self, server: Memory, metrics: Mapping[str, float]) -> Publication:
        """The exported models."""
        return Publication("personal-models", self.export.drafts(server, self.network))
