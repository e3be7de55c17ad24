"""Centralised training: the sites send their images to the server, which trains one network on all of them.

No federated method, but the measure that federated methods are held against, and what a federation is there
to avoid. It is for hospitals that may pool their scans, and for comparisons. The group that travels has the
kind `images`: a site with a policy that does not allow it refuses the run before it starts.

The server takes FedAvg's steps on the pooled slices: a round passes over all of them, or takes `local_steps`
batches for every site that sent any. The last round is published: no validation chooses one.

Shared:  training images with their masks or labels, prepared for the network; the number of them; Dice on
         validation patients; once, batch-norm moments and summary statistics of the training scans.
Stays:   validation and test images, names of files and patients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from typing_extensions import override

from model_store.task import Task
from training.algorithm import (
    ClientResult,
    Group,
    Memory,
    Phase,
    Plan,
    RoundResult,
    ServerStage,
    State,
    StepContext,
)
from training.choices.fedavg import FedAvgConfig
from training.local.loop import train_locally
from training.local.networks import network_of, state_of
from training.local.registry import kind_of
from training.local.site import SiteData
from training.methods.fedavg import FedAvg
from training.methods.registry import register
from training.parts.part import Slot
from training.parts.train import Train

IMAGES = Group("images", "images", "collect")
_POOL = "pool"


@dataclass(frozen=True)
class Pooled:
    """What the sites sent, by site; empty after the training."""

    images: Mapping[str, State] = field(default_factory=dict)


class TrainPooled(Train):
    """`Train`, by the server: the images are sent once, in place of the rounds."""

    def __init__(self, method: FedAvg) -> None:
        super().__init__(method)
        self.method = method
        self.pool = Slot("pool", Pooled())

    @override
    def plan(self) -> Plan:
        pool = Phase("pool", 1, (), (IMAGES,), self.send_images, self.keep_images, everyone=True)
        return pool, ServerStage("train", self.method.config.rounds, self.train_pooled)

    def send_images(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Send the training images."""
        return ClientResult({IMAGES.name: data.train.packed()}, float(len(data.train)))

    def keep_images(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the images by site."""
        sent = result.collected[IMAGES.name]
        return self.pool.write(server, Pooled({site: dict(sent[site]) for site in sorted(sent)}))

    def train_pooled(self, context: StepContext, server: Memory) -> Memory:
        """One round of training on all images; after the last one, they are dropped."""
        method, kind, sent = self.method, kind_of(self.method.task), self.pool.read(server).images
        w_g = self.slot.read(server).w_g
        network = network_of(method.network, w_g, context.device)
        schedule = method.schedule(context.round)
        if schedule.steps is not None:
            schedule = replace(schedule, steps=schedule.steps * len(sent))
        elif kind.short_pass:
            # The least number decides: as many batches as all sites would take.
            schedule = replace(schedule, least_steps=schedule.least_steps * len(sent))
        examples = [kind.unpacked(state, method.task) for state in sent.values()]
        train_locally(network, kind.joined(examples, method.task), schedule, context.generator("train"))
        after = self.moved(server, state_of(network))
        return self.pool.clear(after) if context.round == context.rounds - 1 else after


@register("centralised", FedAvgConfig, kinds=("segmentation", "classification"))
class Centralised(FedAvg):
    """One network, trained by the server on the images of all sites."""

    def __init__(self, config: FedAvgConfig, task: Task) -> None:
        super().__init__(config.model_copy(update={"selection": "last"}), task)

    @override
    def training(self) -> Train:
        return TrainPooled(self)
