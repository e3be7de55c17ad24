"""FedOAP's two stages.

In the first one the network of a site is two parts: gamma travels, rho_k stays. With the phase `validate`,
where the second stage begins, it becomes one model, which is the site's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.adamw import Optimiser, cosine, train_adamw
from personalization.domain_randomisation import randomise_half
from personalization.fedoap.losses import binary_loss, second_stage_loss
from personalization.fedoap.parts import identity, split, start_personal
from personalization.networks import FedOapUNet, build
from personalization.precision import mixed_precision, to_float32
from training.algorithm import ClientResult, Group, Memory, Phase, Plan, RoundResult, State, StepContext
from training.errors import SiteFailed
from training.local.data import slices_of
from training.local.networks import new_network, state_of
from training.local.scores import ValidationScore, evaluate, weight_of
from training.local.site import SiteData
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.models import by_site, on_device
from training.methods.fedoap.tokens import mean_tokens
from training.parts.part import Part, Slot
from training.parts.test import Model, Predict, predicting
from training.parts.train import WEIGHTS
from training.state_tree import join

TOKENS = Group("tokens", "features", "collect", essential=False, bounded=True)
BANK = Group("bank", "features")
CLASSES = 2
JOINED = "joined_val_dice"  # of the weights that a site receives, joined to its own: no one's global model
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Federated:
    """gamma; a personal part that was drawn, which is no site's; the tokens of the sites that sent some."""

    gamma: State = field(default_factory=dict)
    drawn: State = field(default_factory=dict)
    bank: Mapping[str, State] = field(default_factory=dict)


@dataclass(frozen=True)
class Personal:
    """A site's rho_k, empty before its first round, and AdamW's moments after `taken` steps."""

    rho: State = field(default_factory=dict)
    moments: State = field(default_factory=dict)
    taken: int = 0


@dataclass(frozen=True)
class Own:
    """A site's model, whole, and the bank that it attends to; AdamW's moments after `taken` steps.

    `best` is the model of an earlier round while that one is to be kept, and empty else; `score` is that of
    the model to keep.
    """

    model: State = field(default_factory=dict)
    bank: Mapping[str, State] = field(default_factory=dict)
    best: State = field(default_factory=dict)
    score: ValidationScore = field(default_factory=ValidationScore)
    moments: State = field(default_factory=dict)
    taken: int = 0

    @property
    def chosen(self) -> State:
        """The model to keep."""
        return self.best or self.model


class FirstStage(Part):
    """The rounds in which gamma is averaged (Alg. 1)."""

    def __init__(self, config: FedOapConfig, task: Task, spec: NetworkSpec) -> None:
        self.config = config
        self.task = task
        self.spec = spec
        self.slot = Slot("train", Federated())
        self.own = Slot("train", Personal())
        self.downloads = (WEIGHTS, BANK) if config.bank else (WEIGHTS,)

    @override
    def begin(self, context: StepContext, server: Memory) -> Memory:
        """gamma of round 0, and a drawn personal part."""
        gamma, drawn = self.split(state_of(new_network(self.spec, context.generator("weights"))))
        return self.slot.write(server, Federated(gamma, drawn))

    @override
    def plan(self) -> Plan:
        rounds, down = self.config.rounds, self.downloads
        up = (WEIGHTS, TOKENS) if self.config.bank else (WEIGHTS,)
        return (Phase("train", rounds, down, up, self.step, self.average, self.send, self.expect),)

    def send(self, server: Memory, site: str) -> Mapping[str, State]:
        """gamma, and the other sites' tokens."""
        federated = self.slot.read(server)
        others = {other: entry for other, entry in federated.bank.items() if other != site}
        sent = {WEIGHTS.name: federated.gamma, BANK.name: join(others)}
        return {group.name: sent[group.name] for group in self.downloads}

    def expect(self, server: Memory) -> Mapping[str, State]:
        """Tokens are as many as of an image."""
        if not self.config.bank:
            return {}
        with torch.device("meta"):
            network = build(self.spec.name, **self.spec.arguments)
            assert isinstance(network, FedOapUNet)
            found = network.keys_and_values(torch.empty(1, network.in_channels, *self.task.size))
        return {TOKENS.name: {name: t[0] for name, t in zip(("key", "value"), found, strict=True)}}

    # ------------------------------------------------------------------ at a site

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """A round, on the network that is validated before it."""
        config, before = self.config, self.own.read(memory)
        network = self.network(context, self.joined(context, received, memory), received)
        score = evaluate(network, data.val, CLASSES, config.batch_size)

        def loss(images: Tensor, targets: Tensor) -> Tensor:
            return self.loss(logits(config, network, images), targets)

        batches = endless(config, data, context, randomise=config.randomises(context.round))
        adamw = Optimiser(config.weight_decay, before.moments, before.taken)
        mean, adamw = train_adamw(network, batches, loss, self.rates(context.round), adamw)
        gamma, rho = self.split(state_of(network))
        uploads = {WEIGHTS.name: gamma}
        if config.bank:
            bounds = config.bounds.stricter(context.bounds)
            slices = slices_of(data.train)
            uploads[TOKENS.name] = mean_tokens(network, slices, config.batch_size, bounds, context.noise)
        return ClientResult(
            uploads,
            weight_of(data, config.aggregation),
            self.own.write(memory, Personal(rho, adamw.moments, adamw.taken)),
            {**score.metrics(JOINED), "loss": mean},
        )

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """L_s."""
        return binary_loss(logits, targets)

    def rates(self, round_: int) -> list[float]:
        """The learning rates of a round's steps. A cosine per round never decays over the rounds."""
        config, steps = self.config, self.config.local_steps
        first, total = (0, steps) if config.cosine == "round" else (round_ * steps, config.rounds * steps)
        return cosine(config.learning_rate, config.least_rate, total, range(first, first + steps))

    def joined(self, context: StepContext, received: Mapping[str, State], memory: Memory) -> State:
        """gamma, joined to the site's rho."""
        gamma = received[WEIGHTS.name]
        return {**gamma, **(self.own.read(memory).rho or self.first_rho(context, gamma))}

    def first_rho(self, context: StepContext, gamma: State) -> State:
        """The personal part of a site that has none yet."""
        drawn = self.split(state_of(new_network(self.spec, context.generator("personal"))))[1]
        return start_personal(gamma, drawn) if self.config.personal_start == "shared" else identity(drawn)

    def network(self, context: StepContext, model: State, received: Mapping[str, State]) -> FedOapUNet:
        """A network of these weights, which attends to the bank that was received."""
        return on_device(self.spec, model, by_site(received.get(BANK.name, {})), context.device)

    def split(self, state: State) -> tuple[State, State]:
        """gamma and rho."""
        return split(state, own_keys=self.config.own_keys)

    # ------------------------------------------------------------------ at the server

    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """gamma <- (1/K) sum_k gamma_k (line 7); the round's tokens replace the bank."""
        sent = result.collected.get(TOKENS.name, {})
        bank = {site: sent[site] for site in sorted(sent) if sent[site]}
        after = replace(self.slot.read(server), gamma=result.reduced[WEIGHTS.name], bank=bank)
        return self.slot.write(server, after)


class SecondStage(Part):
    """What every site makes of its joined model by itself, with the last bank."""

    def __init__(self, first: FirstStage) -> None:
        self.first = first
        self.config = first.config
        self.slot = Slot("own", Own())

    @override
    def plan(self) -> Plan:
        first = self.first
        begin = Phase("validate", 1, first.downloads, (), self.join, broadcast=first.send, everyone=True)
        return (begin, *(self.tuning() if self.config.fine_tune_rounds else ()))

    def tuning(self) -> Plan:
        """The phases after the models are joined."""
        return (Phase("finetune", self.config.fine_tune_rounds, (), (), self.step, everyone=True),)

    def join(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Join and validate the end of stage 1. The parts that it had are not kept."""
        model = self.first.joined(context, received, memory)
        network = self.first.network(context, model, received)
        score = evaluate(network, data.val, CLASSES, self.config.batch_size)
        own = Own(model, by_site(received.get(BANK.name, {})), score=_dice(score))
        kept = self.slot.write(self.first.own.clear(memory), own)
        return ClientResult({}, 1.0, kept, score.metrics(JOINED))

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """A round, validated after it. Raises SiteFailed without a model."""
        config, own = self.config, self.own(memory)
        network = on_device(self.first.spec, own.model, own.bank, context.device)
        steps = config.fine_tune_steps or config.local_steps
        rates = cosine(
            config.fine_tune_rate or config.learning_rate,
            config.least_rate,
            steps * context.rounds,
            range(steps * context.round, steps * (context.round + 1)),
        )
        loss = self.loss(context, received, network)
        batches = endless(config, data, context, randomise=config.domain_randomisation != "none")
        adamw = Optimiser(config.weight_decay, own.moments, own.taken)
        mean, adamw = train_adamw(network, batches, loss, rates, adamw)
        score = evaluate(network, data.val, CLASSES, config.batch_size)
        gamma, rho = self.first.split(state_of(network))
        after = replace(own, model={**gamma, **rho}, moments=adamw.moments, taken=adamw.taken)
        if config.selection == "last" or score.beats(own.score):
            after = replace(after, best={}, score=_dice(score))
        else:
            after = replace(after, best=own.chosen)
        metrics = {**score.metrics("personal_val_dice"), "loss": mean}
        return ClientResult({}, 1.0, self.slot.write(memory, after), metrics)

    def loss(self, context: StepContext, received: Mapping[str, State], network: FedOapUNet) -> Loss:
        """The perturbed boundary loss; one forward pass for both of its terms."""
        config, generator = self.config, context.generator("perturbation")

        def loss(images: Tensor, targets: Tensor) -> Tensor:
            return second_stage_loss(
                logits(config, network, images),
                targets,
                generator,
                perturbed=config.fine_tune_loss == "perturbed",
                variance=config.pbl_variance,
                threshold=config.pbl_threshold,
                trade_off=config.pbl_trade_off,
            )

        return loss

    def own(self, memory: Memory) -> Own:
        """What the site has. Raises SiteFailed without a model."""
        if not self.slot.holds(memory):
            raise SiteFailed("it has no model of its own: it dropped out of the phase 'validate'")
        return self.slot.read(memory)

    def answers(
        self, context: StepContext, received: Mapping[str, State], memory: Memory
    ) -> Mapping[Model, Predict | None]:
        """The model that a site tests: its own, with the bank that this attends to."""
        own = self.slot.read(memory)
        if not own.model:
            return {"personal": None}
        network = on_device(self.first.spec, own.chosen, own.bank, context.device)
        return {"personal": predicting(network, self.config.batch_size)}

    def exported(self, memory: Memory) -> tuple[State, ValidationScore]:
        """The model to keep, and its score. The bank that it attends to is the server's already."""
        own = self.own(memory)
        return own.chosen, own.score


def logits(config: FedOapConfig, network: FedOapUNet, images: Tensor) -> Tensor:
    """z [B, 1, H, W] float32, for a loss; the network's products are of the configured precision."""
    with mixed_precision(config.precision, images.device):
        found: Tensor = network.segment(images)[0]
    return to_float32(found)


def endless(
    config: FedOapConfig, data: SiteData, context: StepContext, *, randomise: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one epoch after the other. Raises SiteFailed when there is nothing to train on."""
    if not len(data.train):
        raise SiteFailed("expected at least one training slice, found none")
    draw, slices = context.generator("train"), slices_of(data.train)
    for _ in count():
        for images, targets in slices.epoch(config.batch_size, draw, config.augment, 1, context.device):
            yield randomise_half(images, draw)[0] if randomise else images, targets


def _dice(score: ValidationScore) -> ValidationScore:
    """The score without the metrics beside it, by which nothing is chosen."""
    return ValidationScore(score.total, score.patients)
