"""FedOAP's rivals on its own backbone, with its loss and optimiser: what differs is what stays at a site.

FedPer (Arivazhagan et al., 2019) keeps the decoder and the head; FedRep (Collins et al., 2021) keeps the same
and trains the two in turn; FedBN (Li et al., 2021) keeps batch norm, and so has a backbone with it, FedOAP's
having none. FedAvg is FedOAP with neither attention nor adapter and without a second stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from model_store.task import Task
from personalization.adamw import Optimiser, train_adamw
from personalization.binary import binary_loss
from personalization.networks import FedOapUNet, build
from personalization.networks.registry import register
from training.algorithm import ClientResult, Context, Memory, Phase, ServerStage, State
from training.data.dataset import SiteData
from training.methods.fedavg import SCORES, WEIGHTS, score_metrics, score_state
from training.methods.fedoap import FedOap
from training.methods.fedoap_config import FedOapConfig
from training.methods.iop_fl import PERSONAL, PERSONAL_SCORE
from training.methods.local import Score, evaluate, state_of
from training.methods.trees import join, part

BODY = ("encoder", "bottleneck")


@register("benchmark-batch-norm-unet")
class BatchNormUNet(FedOapUNet):
    """FedOAP's backbone with batch normalisation in place of instance normalisation."""

    def __init__(self, in_channels: int, width: int = 64, **options: Any) -> None:
        super().__init__(in_channels, width, **options)
        for module in [*self.modules()]:
            for name, child in [*module.named_children()]:
                if isinstance(child, nn.InstanceNorm2d):
                    setattr(module, name, nn.BatchNorm2d(child.num_features))


class FedPer(FedOap):
    """What comes after the bottleneck stays at its site."""

    def is_personal(self, name: str) -> bool:
        """Whether a tensor of the state stays."""
        return not name.startswith(BODY)

    def _split(self, state: State) -> tuple[State, State]:
        personal = {name: tensor for name, tensor in state.items() if self.is_personal(name)}
        return {name: tensor for name, tensor in state.items() if name not in personal}, personal


class FedBn(FedPer):
    """Batch norm stays: weights, biases and running statistics."""

    def __init__(self, config: FedOapConfig, task: Task) -> None:
        super().__init__(config, task)
        self.network = self.network.model_copy(update={"name": "benchmark-batch-norm-unet"})
        with torch.device("meta"):
            network = build(self.network.name, **self.network.arguments)
        modules = network.named_modules()
        self._norms = tuple(f"{name}." for name, module in modules if isinstance(module, nn.BatchNorm2d))

    def is_personal(self, name: str) -> bool:
        """Whether a tensor of the state stays."""
        return name.startswith(self._norms)


class FedRep(FedPer):
    """FedPer that trains what stays in the first half of a round, and what is shared in the second."""

    def _train(
        self, context: Context, memory: Memory, data: SiteData, network: FedOapUNet, score: Score
    ) -> ClientResult:
        rates = self.rates(context.round)
        half = max(1, len(rates) // 2)
        batches = self._batches(data, context)
        kept: dict[str, State] = {}
        taken: dict[str, int] = {}
        total = 0.0
        for turn, own in (("head", rates[:half]), ("body", rates[half:])):
            for name, parameter in network.named_parameters():
                parameter.requires_grad_(self.is_personal(name) == (turn == "head"))
            before = Optimiser(
                self.config.weight_decay,
                part(memory.tensors, f"optimiser/{turn}"),
                memory.facts.get("taken", {}).get(turn, 0),
            )
            loss, after = train_adamw(
                network,
                batches,
                lambda images, targets: binary_loss(self.logits(network, images), targets),
                own,
                before,
            )
            kept[f"optimiser/{turn}"], taken[turn] = after.moments, after.taken
            total += loss * len(own)
        shared, personal = self._split(state_of(network))
        return ClientResult(
            {WEIGHTS.name: shared, SCORES.name: score_state(score)},
            1.0,
            Memory(join({**kept, "personal": personal}), {"taken": taken}),
            {**score_metrics("val_dice", score), "loss": total / len(rates)},
        )


class SecondStage(FedOap):
    """Stage 2 alone, from what a run without one left on the server: arms differ in it and in nothing before.

    `first` must have every site's exported model.
    """

    def __init__(self, config: FedOapConfig, task: Task, first: Memory) -> None:
        super().__init__(config, task)
        self._first = first

    def plan(self) -> tuple[Phase | ServerStage, ...]:
        """Validate the models, fine-tune them, and export."""
        return (
            Phase("validate", 1, (), (SCORES,), everyone=True),
            Phase("finetune", self.config.fine_tune_rounds, (), (), everyone=True),
            Phase("export", 1, (), (PERSONAL, PERSONAL_SCORE), consent=True, everyone=True),
        )

    def initial(self, context: Context) -> Memory:  # noqa: ARG002  # where it begins is given
        """What the first stage left."""
        return self._first

    def client_step(
        self, context: Context, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """The phase's step; the site's model is there already."""
        if context.phase != "validate":
            return super().client_step(context, received, memory, data)
        model = part(self._first.tensors, f"inside/{context.site}")
        entries = part(self._first.tensors, "bank")
        bank = {name: t for name, t in entries.items() if not name.startswith(f"{context.site}/")}
        network = self._network(context, model, bank)
        return self._join(model, bank, evaluate(network, data.val, 2, self.config.batch_size))
