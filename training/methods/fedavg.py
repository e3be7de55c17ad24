"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

The federation of IOP-FL (Jiang et al., 2023), Eq. 1 and 3. In a round every site k starts from the global
w_g, trains on its own slices (Eq. 3: w_k <- w_k - eta grad L, with Adam), and the server averages

    w_g <- sum_k (n_k / n) w_k         n_k training slices; uniform, 1/K, is an option (Eq. 1 as printed)

Batch-norm buffers are part of the weights: running statistics are averaged, counters copied. The optimiser
restarts every round. In each round the sites also validate the w_g they receive; the server keeps the best.

The default is not the paper's: the rate falls by a cosine in the second half of the rounds, a small site
takes more than one pass where its slices make few batches, and slices go through drawn scanners. After the
last round the sites estimate the batch-norm statistics of the kept w_g, and how far they are from these.
`recipe: paper` leaves all of this out (docs/explanation/iop-fl.md has what each was worth).

A classification has cross-entropy for the loss and accuracy for Dice; all else is the same. `loss` names
another loss. With `rotation_head` the network also learns to tell quarter turns, which test-time training at
a hospital needs (`training.parts.rotation`).

Shared:  weights w_k and w_g; the number of training slices; what the parts say that they share.
Stays:   images, masks, and everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.metrics import metrics_of
from training.algorithm import Group, Memory, ModelDraft, Publication, RoundResult, State, StepContext
from training.choices.fedavg import FedAvgConfig, RotationHeadConfig
from training.local.loop import Penalty, train_locally
from training.local.networks import network_of, new_network, state_of
from training.local.schedule import Schedule
from training.local.site import SiteData
from training.methods.registry import register
from training.parts.describe import Describe
from training.parts.judge import Judge
from training.parts.norms import EstimateNorms
from training.parts.part import Part, Parted, Slot
from training.parts.rotation import RotationHead, together
from training.parts.spread import Spread
from training.parts.test import Model, Predict, Test
from training.parts.train import WEIGHTS, SiteRound, Train, Update, Validate


@register("fedavg", RotationHeadConfig, kinds=("segmentation", "classification"))
class FedAvg(Parted):
    """FedAvg of one network: by default a U-Net for a segmentation, a ResNet-18 for a classification."""

    # What travels beside the weights in a round, to a site and from it.
    downloads: tuple[Group, ...] = ()
    uploads: tuple[Group, ...] = ()
    # What the server remembers of the rounds until the last of them.
    while_training: tuple[Slot[Any], ...] = ()
    # Whether the server moves w_g away from the sites' mean, so that it has no batch-norm statistics.
    bare: ClassVar[bool] = False

    def __init__(self, config: FedAvgConfig, task: Task) -> None:
        self.config = config
        self.task = task
        self.classes = len(task.classes)
        self.network = self.architecture(task)
        self.loss = config.loss_for(task)
        self.metric = f"val_{metrics_of(task.kind)[0].name}"
        self.describe = Describe(config.aggregation)
        self.train = self.training()
        self.spread = Spread(self.network, self.classes, config.batch_size)
        self.test = Test(task, self.answers, ("",), (WEIGHTS,), self.train.send_selected)
        self.parts: Sequence[Part] = (
            self.describe,
            self.train,
            RotationHead(config),
            Validate(self.train),
            EstimateNorms(self.train, self.spread, bare=self.bare),
            self.spread,
            Judge(self.train),
            self.test,
        )

    def training(self) -> Train:
        """The part that trains w_g."""
        return Train(self)

    def architecture(self, task: Task) -> NetworkSpec:
        """The network that the sites train."""
        return self.config.network_for(task)

    def first_weights(self, generator: torch.Generator) -> State:
        """The weights before any training: those of the start, and what it does not have from `generator`."""
        return self.config.started(state_of(new_network(self.network, generator)))

    # ------------------------------------------------------------------ at a site

    def network_here(self, context: StepContext, w_g: State, data: SiteData) -> nn.Module:
        """The network that a site scores, and trains, when it receives w_g in a round: w_g as it is."""
        return network_of(self.network, w_g, context.device)

    def update(self, network: nn.Module, here: SiteRound) -> Update:
        """w_k, from w_g (Eq. 3)."""
        loss = self.fit(network, here)
        return Update(state_of(network), loss)

    def fit(self, network: nn.Module, here: SiteRound) -> float:
        """Train a site's network in place, from w_g (Eq. 3); returns the mean loss."""
        added = (each.term(here.context, network, here.data) for each in self.parts)
        terms = together(self.penalty(network), *added)
        schedule, draw = self.schedule(here.context.round), here.context.generator("train")
        return train_locally(network, here.data.train, schedule, draw, terms)

    def penalty(self, network: nn.Module) -> Penalty | None:
        """What is added to the loss of every batch, of a network that holds w_g now; nothing in FedAvg."""
        return None

    def schedule(self, round_: int) -> Schedule:
        """How a site trains in a round."""
        return self.config.schedule(round_, self.task, self.loss)

    def answers(
        self, context: StepContext, received: Mapping[str, State], memory: Memory
    ) -> Mapping[Model, Predict | None]:
        """The models that a site tests: the selected w_g."""
        return {"": self.train.answers(context, received[WEIGHTS.name])}

    # ------------------------------------------------------------------ at the server

    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """w_g <- sum_k (n_k / n) w_k (Eq. 1)."""
        return self.train.moved(server, result.reduced[WEIGHTS.name])

    def send_beside(self, server: Memory) -> Mapping[str, State]:
        """The `downloads`."""
        return {}

    def expect_beside(self, server: Memory) -> Mapping[str, State]:
        """Those of the `uploads` that are not like a download of the same name."""
        return {}

    @override
    def made(self, server: Memory, metrics: Mapping[str, float]) -> Publication:
        """The selected w_g."""
        selected = self.train.slot.read(server).selected
        return Publication("model", (ModelDraft("global", self.network, selected, metrics=metrics),))
