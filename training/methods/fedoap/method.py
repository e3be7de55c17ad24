"""FedOAP: Tashdeed et al., FedOAP: organ-agnostic personalized federated learning for tumours, 2025.

Stage 1 (Alg. 1): in a round, site k joins the shared gamma to its personal rho_k, takes a fixed number of
AdamW steps on both with L_s (appendix G), and sends gamma_k; the server averages (line 7, uniformly):

    gamma <- (1/K) sum_k gamma_k        gamma: all but rho; rho_k: query stage, W_q, spatial adapter

Keys and values of the other sites (Eq. 3) come from a bank: after its steps a site takes the mean of k and v
over its training images at each position, with the gamma_k it has then, and the server hands them on in the
next round. Tokens are one round stale, carry no gradient, and a site that sent none is not attended to; in
round 0 there are own tokens only.

Stage 2: every site fine-tunes all its weights with the perturbed boundary loss, on the last gamma and bank,
and keeps the best on its own validation patients.

Shared:  gamma_k; mean tokens (kind `features`, bounded by federation and site, not essential), the last of
         which are published in every model, with or without consent; Dice on validation patients; once,
         summary statistics; once, the scores of the site's model on its test and validation patients. In the
         phase `export`, and only at sites that consent: the site's whole model.
Stays:   rho_k until then; AdamW's moments; images, masks, and everything else.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.adamw import cosine
from personalization.fedoap.joining import predict
from personalization.fedoap.losses import binary_loss
from personalization.fedoap.parts import split
from personalization.networks import FedOapUNet, build
from training.algorithm import (
    Algorithm,
    ClientResult,
    Group,
    Memory,
    Phase,
    Plan,
    Publication,
    RoundResult,
    State,
    StepContext,
)
from training.local.data import slices_of
from training.local.networks import new_network, state_of
from training.local.scores import evaluate, weight_of
from training.local.site import SiteData
from training.methods.fedavg import WEIGHTS
from training.methods.fedoap import client as local
from training.methods.fedoap import models
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.tokens import mean_tokens
from training.methods.registry import Panel, register
from training.parts.describe import describe_phase
from training.parts.export import PERSONAL, export_phase
from training.parts.test import predicting, score_once, scoring_phase
from training.state_tree import join, part

TOKENS = Group("tokens", "features", "collect", essential=False, bounded=True)
BANK = Group("bank", "features")


def attention(network: FedOapUNet, images_NCHW: Tensor) -> Tensor:
    """[N, sources]: each image's attention to its own tokens and to every site's."""
    return predict(network, images_NCHW)[1]


@register(
    "fedoap",
    FedOapConfig,
    panels=(Panel("transmission", after="traffic"),),
    attention=attention,
    refused={"volumes": "its keys and values are those of a 2-D U-Net's bottleneck"},
)
class FedOap(Algorithm):
    """FedOAP for a task with one foreground class.

    A method that is made of it overrides the steps of a phase, changes which phases there are in `plan`, and
    `network`, which every step builds its networks from.
    """

    def __init__(self, config: FedOapConfig, task: Task) -> None:
        models.check_task(task)
        self.config = config
        self.task = task
        self.network = NetworkSpec(
            name="fedoap", arguments={"in_channels": task.in_channels, **config.network}
        )

    @override
    def plan(self) -> Plan:
        """Describe, stage 1, join and validate the last of it, stage 2, test, and the consented export."""
        config = self.config
        down = (WEIGHTS, BANK) if config.bank else (WEIGHTS,)
        up = (WEIGHTS, TOKENS) if config.bank else (WEIGHTS,)
        tune = Phase("finetune", config.fine_tune_rounds, (), (), self.fine_tune_step, everyone=True)
        return (
            # Every site counts alike in what is described, whatever `aggregation` says
            describe_phase("uniform"),
            Phase(
                "train", config.rounds, down, up, self.train_step, self.average, self.send, self.expect_tokens
            ),
            Phase("validate", 1, down, (), self.validate_step, broadcast=self.send, everyone=True),
            *((tune,) if tune.rounds else ()),
            scoring_phase(self.task, (), self.score_step, models=("personal",)),
            export_phase(self.export_step, self.expect_whole),
        )

    @override
    def initial(self, context: StepContext) -> Memory:
        """gamma of round 0, and a drawn personal part, which is no site's, for the global model."""
        state = state_of(new_network(self.network, context.generator("weights")))
        shared, personal = self._split(state)
        return Memory(join({"global": shared, "drawn": personal}), {"exported": {}})

    def expect_tokens(self, server: Memory) -> Mapping[str, State]:
        """Tokens are as many as of an image."""
        if not self.config.bank:
            return {}
        with torch.device("meta"):
            network = build(self.network.name, **self.network.arguments)
            assert isinstance(network, FedOapUNet)
            found = network.keys_and_values(torch.empty(1, network.in_channels, *self.task.size))
        return {TOKENS.name: {name: t[0] for name, t in zip(("key", "value"), found, strict=True)}}

    def expect_whole(self, server: Memory) -> Mapping[str, State]:
        """An exported model is a whole network."""
        return {PERSONAL.name: {**part(server.tensors, "global"), **part(server.tensors, "drawn")}}

    def send(self, server: Memory, site: str) -> Mapping[str, State]:
        """gamma, and the other sites' tokens."""
        sent = {WEIGHTS.name: part(server.tensors, "global")}
        if self.config.bank:
            bank = part(server.tensors, "bank")
            sent[BANK.name] = {name: t for name, t in bank.items() if not name.startswith(f"{site}/")}
        return sent

    # ------------------------------------------------------------------ at a site

    def train_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """A round of stage 1, on the network that is validated before it."""
        config = self.config
        network = self._network(context, self._joined(context, received, memory), received.get(BANK.name, {}))
        score = evaluate(network, data.val, local.CLASSES, config.batch_size)

        def loss(images: Tensor, targets: Tensor) -> Tensor:
            return self.loss(self.logits(network, images), targets)

        mean, optimiser = local.take_steps(
            config,
            network,
            data,
            context,
            memory,
            loss,
            self.rates(context.round),
            config.randomises(context.round),
        )
        shared, personal = self._split(state_of(network))
        uploads = {WEIGHTS.name: shared}
        if config.bank:
            bounds = config.bounds.stricter(context.bounds)
            slices = slices_of(data.train)
            uploads[TOKENS.name] = mean_tokens(network, slices, config.batch_size, bounds, context.noise)
        kept = join({"personal": personal, "optimiser": optimiser.moments})
        return ClientResult(
            uploads,
            weight_of(data, config.aggregation),
            Memory(kept, {"taken": optimiser.taken}),
            {**score.metrics(local.JOINED), "loss": mean},
        )

    def validate_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Join and validate the end of stage 1, with which stage 2 begins."""
        model, bank = self._joined(context, received, memory), received.get(BANK.name, {})
        network = self._network(context, model, bank)
        return local.begin(model, bank, evaluate(network, data.val, local.CLASSES, self.config.batch_size))

    def fine_tune_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """A round of stage 2."""
        return local.fine_tune(self.config, self.network, context, memory, data)

    def score_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Score the site's model, with the bank that it attends to, on the site's test patients."""
        model, answer = local.chosen(memory), None
        if model:
            network = self._network(context, model, part(memory.tensors, "bank"))
            answer = predicting(network, self.config.batch_size)
        return score_once({"personal": answer}, data, self.task)

    def export_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Send the model of stage 2."""
        return local.export(memory)

    def rates(self, round_: int) -> list[float]:
        """The learning rates of a round's steps. A cosine per round never decays over the rounds."""
        config, steps = self.config, self.config.local_steps
        first, total = (0, steps) if config.cosine == "round" else (round_ * steps, config.rounds * steps)
        return cosine(config.learning_rate, config.least_rate, total, range(first, first + steps))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """L_s, the loss of stage 1."""
        return binary_loss(logits, targets)

    def logits(self, network: FedOapUNet, images: Tensor) -> Tensor:
        """z [B, 1, H, W] float32, for a loss; the network's products are of the configured precision."""
        return local.logits(self.config, network, images)

    def _joined(self, context: StepContext, received: Mapping[str, State], memory: Memory) -> State:
        """gamma, joined to the site's rho."""
        shared = received[WEIGHTS.name]
        return {**shared, **(part(memory.tensors, "personal") or self._start(context, shared))}

    def _start(self, context: StepContext, shared: State) -> State:
        """The personal part of a site that has none yet."""
        drawn = self._split(state_of(new_network(self.network, context.generator("personal"))))[1]
        return models.start(self.config, shared, drawn)

    def _network(self, context: StepContext, model: State, bank: State) -> FedOapUNet:
        return models.on_device(self.network, model, models.entries(bank), context.device)

    def _split(self, state: State) -> tuple[State, State]:
        return split(state, own_keys=self.config.own_keys)

    # ------------------------------------------------------------------ at the server

    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Average, and replace the bank by the round's tokens."""
        sent = result.collected.get(TOKENS.name, {})
        states: dict[str, State] = {
            "global": dict(result.reduced[WEIGHTS.name]),
            "drawn": part(server.tensors, "drawn"),
            "bank": join({site: dict(entry) for site, entry in sent.items() if entry}),
        }
        return Memory(join(states), server.facts)

    @override
    def publication(self, server: Memory) -> Publication:
        """A cross-attention artefact: the global model, and the exported ones. Raises PublishError."""
        return models.publication(self.config, self.network, self.task, server)
