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
from dataclasses import replace

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
from training.local.loop import train_locally
from training.local.networks import network_of, state_of
from training.local.registry import kind_of
from training.local.scores import AnySiteData
from training.methods.fedavg import FedAvg, FedAvgConfig
from training.methods.registry import register
from training.state_tree import join, part

IMAGES = Group("images", "images", "collect")
_POOL = "pool"


@register("centralised", FedAvgConfig, kinds=("segmentation", "classification"))
class Centralised(FedAvg):
    """One network, trained by the server on the images of all sites."""

    def __init__(self, config: FedAvgConfig, task: Task) -> None:
        super().__init__(config.model_copy(update={"selection": "last"}), task)

    @override
    def plan(self) -> Plan:
        """FedAvg's plan, with the images sent once and trained on by the server in place of the rounds."""
        describe, _, *validate = super().plan()
        pool = Phase("pool", 1, (), (IMAGES,), self.send_images, self.keep_images, everyone=True)
        return (describe, pool, ServerStage("train", self.config.rounds, self.train_pooled), *validate)

    def send_images(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Send the training images."""
        return ClientResult({IMAGES.name: data.train.packed()}, float(len(data.train)))

    def keep_images(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the images by site."""
        sent = {f"{_POOL}/{site}": dict(state) for site, state in result.collected[IMAGES.name].items()}
        facts = {**server.facts, "pooled": sorted(result.weights)}
        return Memory({**server.tensors, **join(sent)}, facts)

    def train_pooled(self, context: StepContext, server: Memory) -> Memory:
        """One round of training on all images; after the last one, they are dropped."""
        sites, kind = server.facts["pooled"], kind_of(self.task)
        network = network_of(self.network, part(server.tensors, "global"), context.device)
        schedule = self.schedule(context.round)
        if schedule.steps is not None:
            schedule = replace(schedule, steps=schedule.steps * len(sites))
        elif kind.short_pass:
            # The least number decides: as many batches as all sites would take.
            schedule = replace(schedule, least_steps=schedule.least_steps * len(sites))
        sent = [kind.unpacked(part(server.tensors, f"{_POOL}/{site}"), self.task) for site in sites]
        train_locally(network, kind.joined(sent, self.task), schedule, context.generator("train"))
        tensors = {**server.tensors, **join({"global": state_of(network)})}
        if context.round == context.rounds - 1:
            tensors = {n: tensor for n, tensor in tensors.items() if not n.startswith(f"{_POOL}/")}
        return Memory(tensors, server.facts)
