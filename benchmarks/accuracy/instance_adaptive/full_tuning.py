"""Federated tuning of a given network: the arms that FedIns is held against.

FedAvg of all weights; with `prox`, FedProx's term mu/2 |w - w_g|^2 (Li et al., 2020); with `local_norms`,
FedBN's rule that norms stay at the site (Li et al., 2021; a ViT's are layer norms); of the head alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.networks import Backbone
from personalization.state import State
from training.algorithm import ClientResult, Memory, Phase, StepContext
from training.data.segmentation.dataset import SliceSet
from training.engine.folder import RunFolder, SiteFolder
from training.methods.common.local_training import (
    AnySiteData,
    Penalty,
    Schedule,
    TrainingExamples,
    task_loss,
)
from training.methods.common.personal_parts import join_own, keep_own, own_part
from training.methods.common.state_tree import join, part
from training.methods.fedavg import WEIGHTS, FedAvg, FedAvgConfig
from training.methods.fedbn import norm_tensors
from training.methods.fedprox import proximal_term


class FullTuning(FedAvg):
    """FedAvg from given weights."""

    def __init__(
        self,
        config: FedAvgConfig,
        task: Task,
        network: NetworkSpec,
        start: State,
        *,
        prox: float = 0.0,
        local_norms: bool = False,
        only_head: bool = False,
    ) -> None:
        super().__init__(config, task)
        self.network = network
        self._start, self._prox, self._only_head = start, prox, only_head
        self._own = norm_tensors(network) if local_norms else frozenset()

    def initial(self, context: StepContext) -> Memory:  # noqa: ARG002
        """The given weights."""
        return Memory(join({"global": self._start}))

    def client_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """As FedAvg's, from the site's own norms where they stay."""
        result = super().client_step(context, join_own(received, own_part(memory)), memory, data)
        return keep_own(result, memory, self._own.__contains__)

    def expected(self, phase: Phase, server: Memory) -> Mapping[str, State]:  # noqa: ARG002
        """What is shared."""
        shared = part(server.tensors, "global").items()
        return {WEIGHTS.name: {name: tensor for name, tensor in shared if name not in self._own}}

    def train(self, context: StepContext, network: nn.Module, data: AnySiteData) -> float:
        """Not augmented, as no arm is. A frozen body keeps its running statistics too."""
        assert isinstance(network, Backbone)
        trained = list(network.parameters())
        if self._only_head:
            network.requires_grad_(False)
            trained = list(network.get_submodule(network.head_path).requires_grad_(True).parameters())
        schedule, penalty = self.schedule(context.round), self.penalty(network)
        optimiser = torch.optim.Adam(trained, lr=schedule.learning_rate)
        network.train(not self._only_head)
        total, done = 0.0, 0
        for images, targets in _batches(data.train, schedule, context.generator("train")):
            optimiser.zero_grad(set_to_none=True)
            loss = task_loss(network(images.to(context.device)), targets.to(context.device))
            if penalty is not None:
                loss = loss + penalty()
            torch.autograd.backward(loss)
            optimiser.step()
            total, done = total + loss.item(), done + 1
        return total / done

    def penalty(self, network: nn.Module) -> Penalty | None:
        """FedProx's term, in that arm."""
        return proximal_term(network, self._prox) if self._prox else None


def norms_at(folder: Path, site: str) -> State:
    """The norms that a site kept at the end of a run."""
    checkpoint = RunFolder(folder).checkpoint()
    assert checkpoint is not None
    return own_part(SiteFolder(folder, site).load(checkpoint.site_slots[site]))


def _batches(
    data: TrainingExamples, schedule: Schedule, draw: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    images = torch.from_numpy(data.images)
    targets = torch.from_numpy(data.targets if isinstance(data, SliceSet) else data.labels)
    for _ in range(schedule.epochs):
        order = torch.randperm(len(images), generator=draw)
        # Even batches: batch norm has nothing to normalise a single image by.
        for chosen in order.chunk(math.ceil(len(order) / schedule.batch_size)):
            yield images[chosen], targets[chosen]
