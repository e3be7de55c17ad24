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
         summary statistics. In the phase `export`, and only at sites that consent: the site's whole model.
Stays:   rho_k until then; AdamW's moments; images, masks, and everything else.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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
    Publication,
    RoundResult,
    ServerStage,
    State,
    StepContext,
)
from training.data.segmentation.dataset import SiteData
from training.methods.common.data_statistics import DESCRIBE, describe, merge_described
from training.methods.common.export import EXPORT, PERSONAL, keep_exported
from training.methods.common.local_training import (
    ValidationScore,
    evaluate,
    new_network,
    state_of,
    weight_of,
)
from training.methods.common.state_tree import join, part
from training.methods.fedavg import WEIGHTS
from training.methods.fedoap import client as local
from training.methods.fedoap import models
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.tokens import mean_tokens
from training.methods.registry import Panel, register

TOKENS = Group("tokens", "features", "collect", essential=False, bounded=True)
BANK = Group("bank", "features")


def attention(network: FedOapUNet, images_NCHW: Tensor) -> Tensor:
    """[N, sources]: each image's attention to its own tokens and to every site's."""
    return predict(network, images_NCHW)[1]


@register("fedoap", FedOapConfig, panels=(Panel("transmission", after="traffic"),), attention=attention)
class FedOap(Algorithm[SiteData]):
    """FedOAP for a task with one foreground class.

    A method that is made of it changes what a phase does in `client_step`, which phases there are in `plan`,
    and `network`, which every step builds its networks from.
    """

    def __init__(self, config: FedOapConfig, task: Task) -> None:
        models.check_task(task)
        self.config = config
        self.size = task.size
        self.network = NetworkSpec(
            name="fedoap", arguments={"in_channels": task.in_channels, **config.network}
        )

    def plan(self) -> tuple[Phase | ServerStage, ...]:
        """Describe, stage 1, join and validate the last of it, stage 2, and the consented export."""
        down = (WEIGHTS, BANK) if self.config.bank else (WEIGHTS,)
        up = (WEIGHTS, TOKENS) if self.config.bank else (WEIGHTS,)
        tune = Phase("finetune", self.config.fine_tune_rounds, (), (), everyone=True)
        return (
            DESCRIBE,
            Phase("train", self.config.rounds, down, up),
            Phase("validate", 1, down, (), everyone=True),
            *((tune,) if tune.rounds else ()),
            EXPORT,
        )

    def initial(self, context: StepContext) -> Memory:
        """gamma of round 0, and a drawn personal part, which is no site's, for the global model."""
        state = state_of(new_network(self.network, context.generator("weights")))
        shared, personal = self._split(state)
        return Memory(join({"global": shared, "drawn": personal}), {"exported": {}})

    def expected(self, phase: Phase, server: Memory) -> Mapping[str, State]:
        """An exported model is a whole network; tokens are as many as of an image."""
        if TOKENS in phase.uploads:
            with torch.device("meta"):
                network = build(self.network.name, **self.network.arguments)
                assert isinstance(network, FedOapUNet)
                found = network.keys_and_values(torch.empty(1, network.in_channels, *self.size))
            return {TOKENS.name: {name: t[0] for name, t in zip(("key", "value"), found, strict=True)}}
        whole = {**part(server.tensors, "global"), **part(server.tensors, "drawn")}
        return {PERSONAL.name: whole} if phase.name == EXPORT.name else {}

    def broadcast(self, phase: Phase, server: Memory, site: str) -> Mapping[str, State]:
        """gamma, and the other sites' tokens."""
        if not phase.downloads:
            return {}
        bank = part(server.tensors, "bank")
        others = {name: tensor for name, tensor in bank.items() if not name.startswith(f"{site}/")}
        groups = {WEIGHTS.name: part(server.tensors, "global"), BANK.name: others}
        return {group.name: groups[group.name] for group in phase.downloads}

    # ------------------------------------------------------------------ at a site

    def client_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """The phase's step."""
        if context.phase == "describe":
            return describe(data, 1.0)
        if context.phase == "finetune":
            return local.fine_tune(self.config, self.network, context, memory, data)
        if context.phase == "export":
            return local.export(memory)
        personal = part(memory.tensors, "personal") or self._start(context, received[WEIGHTS.name])
        model = {**received[WEIGHTS.name], **personal}
        bank = received.get(BANK.name, {})
        network = self._network(context, model, bank)
        score = evaluate(network, data.val, local.CLASSES, self.config.batch_size)
        if context.phase == "validate":
            return local.begin(model, bank, score)
        return self._train(context, memory, data, network, score)

    def _train(
        self,
        context: StepContext,
        memory: Memory,
        data: SiteData,
        network: FedOapUNet,
        score: ValidationScore,
    ) -> ClientResult:
        """A round of stage 1, on a network that was validated before it."""
        config = self.config

        def loss(images: Tensor, targets: Tensor) -> Tensor:
            return binary_loss(self.logits(network, images), targets)

        mean, optimiser = local.take_steps(
            config, network, data, context, memory, loss, self.rates(context.round)
        )
        shared, personal = self._split(state_of(network))
        uploads = {WEIGHTS.name: shared}
        if config.bank:
            bounds = config.bounds.stricter(context.bounds)
            uploads[TOKENS.name] = mean_tokens(network, data.train, config.batch_size, bounds, context.noise)
        kept = join({"personal": personal, "optimiser": optimiser.moments})
        return ClientResult(
            uploads,
            weight_of(data, config.aggregation),
            Memory(kept, {"taken": optimiser.taken}),
            {**score.metrics(local.JOINED), "loss": mean},
        )

    def rates(self, round_: int) -> list[float]:
        """The learning rates of a round's steps. A cosine per round never decays over the rounds."""
        config, steps = self.config, self.config.local_steps
        first, total = (0, steps) if config.cosine == "round" else (round_ * steps, config.rounds * steps)
        return cosine(config.learning_rate, config.least_rate, total, range(first, first + steps))

    def logits(self, network: FedOapUNet, images: Tensor) -> Tensor:
        """z [B, 1, H, W] float32, for a loss; the network's products are of the configured precision."""
        return local.logits(self.config, network, images)

    def _start(self, context: StepContext, shared: State) -> State:
        """The personal part of a site that has none yet."""
        drawn = self._split(state_of(new_network(self.network, context.generator("personal"))))[1]
        return models.start(self.config, shared, drawn)

    def _network(self, context: StepContext, model: State, bank: State) -> FedOapUNet:
        return models.on_device(self.network, model, models.entries(bank), context.device)

    def _split(self, state: State) -> tuple[State, State]:
        return split(state, own_keys=self.config.own_keys)

    # ------------------------------------------------------------------ at the server

    def server_step(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Average, and replace the bank by the round's tokens; keep what was exported."""
        if context.phase == "describe":
            return Memory(server.tensors, {**server.facts, **merge_described(result)})
        if context.phase == "export":
            return keep_exported(server, result)
        if context.phase != "train":
            return server
        sent = result.collected.get(TOKENS.name, {})
        states: dict[str, State] = {
            "global": dict(result.reduced[WEIGHTS.name]),
            "drawn": part(server.tensors, "drawn"),
            "bank": join({site: dict(entry) for site, entry in sent.items() if entry}),
        }
        return Memory(join(states), server.facts)

    def publication(self, server: Memory) -> Publication:
        """A cross-attention artefact: the global model, and the exported ones. Raises PublishError."""
        return models.publication(self.config, self.network, server)
