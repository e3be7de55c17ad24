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
from training.algorithm import ClientResult, Memory, StepContext
from training.data.segmentation.dataset import SliceSet
from training.engine.folder import RunFolder, SiteFolder
from training.methods.common.data_statistics import describe
from training.methods.common.local_training import (
    AnySiteData,
    Schedule,
    TrainingExamples,
    evaluate,
    network_of,
    state_of,
    task_loss,
)
from training.methods.common.state_tree import join
from training.methods.fedavg import SCORES, WEIGHTS, FedAvg, FedAvgConfig, score_metrics, score_state


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
        self._start, self._prox = start, prox
        self._local_norms, self._only_head = local_norms, only_head

    def initial(self, context: StepContext) -> Memory:  # noqa: ARG002
        """The given weights."""
        return Memory(join({"global": self._start}))

    def client_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """As FedAvg's, from the site's own norms where they stay."""
        weight = float(len(data.train))
        if context.phase == "describe":
            return describe(data, weight)
        state = {**received[WEIGHTS.name], **memory.tensors}
        network = network_of(self.network, state, context.device)
        score = evaluate(network, data.val, self.classes, self.config.batch_size)
        uploads = {SCORES.name: score_state(score)}
        if context.phase != "train":
            return ClientResult(uploads, weight, metrics=score_metrics(self.metric, score))
        schedule = self.schedule(context.round)
        self._train(network, data.train, schedule, context.generator("train"))
        tuned = state_of(network)
        uploads[WEIGHTS.name] = tuned
        kept = None
        if self._local_norms:
            names = norm_parameters(network)
            kept = Memory({name: tensor for name, tensor in tuned.items() if name in names})
        return ClientResult(uploads, weight, kept, score_metrics(self.metric, score))

    def _train(
        self, network: nn.Module, data: TrainingExamples, schedule: Schedule, draw: torch.Generator
    ) -> None:
        """Not augmented, as no arm is. A frozen body keeps its running statistics too."""
        assert isinstance(network, Backbone)
        trained = list(network.parameters())
        if self._only_head:
            network.requires_grad_(False)
            trained = list(network.get_submodule(network.head_path).requires_grad_(True).parameters())
        anchor = [parameter.detach().clone() for parameter in trained]
        optimiser = torch.optim.Adam(trained, lr=schedule.learning_rate)
        network.train(not self._only_head)
        for images, targets in _batches(data, schedule, draw):
            optimiser.zero_grad(set_to_none=True)
            device = anchor[0].device
            loss = task_loss(network(images.to(device)), targets.to(device))
            if self._prox:
                apart = sum(((w - w_g) ** 2).sum() for w, w_g in zip(trained, anchor, strict=True))
                loss = loss + self._prox / 2 * apart
            torch.autograd.backward(loss)
            optimiser.step()


def norm_parameters(network: nn.Module) -> set[str]:
    """Names of the parameters and statistics of norms."""
    return {
        f"{path}.{name}"
        for path, module in network.named_modules()
        if isinstance(module, nn.LayerNorm | nn.BatchNorm2d)
        for name in module.state_dict()
    }


def norms_at(folder: Path, site: str) -> State:
    """The norms that a site kept at the end of a run."""
    checkpoint = RunFolder(folder).checkpoint()
    assert checkpoint is not None
    return SiteFolder(folder, site).load(checkpoint.site_slots[site]).tensors


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
