"""The rounds of training, in which the sites also score what they receive, and the best of these models.

In a round every site scores the model that it receives on its validation patients, trains from it and sends
the result. The server keeps the best model that was sent; the last one is scored in a phase of its own.

Shared:  the trained weights; the number of training examples; the score on validation patients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal, Protocol

import torch
from torch import nn
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from training.algorithm import ClientResult, Group, Memory, Phase, Plan, RoundResult, State, StepContext
from training.choices.fedavg import FedAvgConfig
from training.local.networks import network_of
from training.local.norms import positive_variances
from training.local.scores import ValidationScore, evaluate, weight_of
from training.local.site import SiteData
from training.parts.part import Added, Part, Slot
from training.parts.test import Predict, predicting

WEIGHTS = Group("weights", "weights", "mean", repair=positive_variances)
SCORES = Group("scores", "statistics", "collect", essential=False, check=ValidationScore.check)


class Selection(Protocol):
    """What a configuration says of the round to publish."""

    @property
    def selection(self) -> Literal["best", "last"]:
        """The best round, or the last one."""

    def selectable(self, rounds_done: int) -> bool:
        """Whether a model after so many rounds may be selected."""


@dataclass(frozen=True)
class Noted:
    """What a model after so many rounds scores; without `metrics` where no patient counts."""

    round: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Shared:
    """The model that all sites share: w_g of the round, and `best`, the one that is to be published.

    `best` is empty, and `chosen` None, while that is w_g itself. `scores` has the last score of each site,
    `latest` what they come to.
    """

    w_g: State = field(default_factory=dict)
    best: State = field(default_factory=dict)
    scores: Mapping[str, ValidationScore] = field(default_factory=dict)
    latest: Noted = field(default_factory=Noted)
    chosen: Noted | None = None

    @property
    def selected(self) -> State:
        """The weights to publish: of the best round, or of the last one where nothing could be validated."""
        return self.best if self.chosen else self.w_g

    @property
    def noted(self) -> Noted:
        """The round and the scores of `selected`."""
        return self.chosen or self.latest

    def noting(self, result: RoundResult, metric: str, rounds_done: int) -> Shared:
        """With the scores of `selected`, or of w_g, that the sites sent.

        A site that was not there this round counts with its last score: else rounds would be compared on
        different patients.
        """
        sent = result.collected.get(SCORES.name, {}).items()
        scores = {**self.scores, **{site: ValidationScore.received(state) for site, state in sent}}
        total = ValidationScore.together(list(scores.values()))
        return replace(self, scores=scores, latest=Noted(rounds_done, total.metrics(metric)))

    def choosing(self, before: Shared, metric: str) -> Shared:
        """With w_g as `best` if the `metric` of `latest` is higher than that of all rounds before.

        The best is forgotten when patients are scored for the first time: they were in no score before.
        """
        newly = any(score.patients for site, score in self.scores.items() if site not in before.scores)
        found = self.latest.metrics.get(metric)
        best = None if self.chosen is None or newly else self.chosen.metrics[metric]
        if found is not None and (best is None or found > best):
            return replace(self, best=self.w_g, chosen=self.latest)
        return self if best is not None else self.keeping_last()

    def after(self, result: RoundResult, config: Selection, metric: str, rounds_done: int) -> Shared:
        """`noting` the scores of w_g, which has so many rounds of training behind it, then `choosing`."""
        noted = self.noting(result, metric, rounds_done)
        keeps_best = config.selection == "best" and config.selectable(rounds_done)
        return noted.choosing(self, metric) if keeps_best else noted.keeping_last()

    def keeping_last(self) -> Shared:
        """With w_g for `selected`."""
        return replace(self, best={}, chosen=None)

    def with_selected(self, weights: State) -> Shared:
        """With other weights for `selected`."""
        return replace(self, best=weights) if self.chosen else replace(self, w_g=weights)


@dataclass(frozen=True)
class Update:
    """What a site makes of w_g in a round: the weights that it sends, with what it sends beside them, the
    mean loss and other numbers to watch, and what it keeps."""

    weights: State
    loss: float
    beside: Mapping[str, State] = field(default_factory=dict)
    memory: Memory | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteRound:
    """A round at a site: what it received, what it remembers, and its data."""

    context: StepContext
    received: Mapping[str, State]
    memory: Memory
    data: SiteData


class Learner(Protocol):
    """What the parts ask of a method that trains one network. `FedAvg` has the answers."""

    config: FedAvgConfig
    task: Task
    network: NetworkSpec
    metric: str
    # What travels beside the weights in a round, to a site and from it.
    downloads: tuple[Group, ...]
    uploads: tuple[Group, ...]
    # What the server remembers of the rounds until the last of them.
    while_training: tuple[Slot[Any], ...]

    def first_weights(self, generator: torch.Generator) -> State:
        """The weights before any training."""

    def send_beside(self, server: Memory) -> Mapping[str, State]:
        """The `downloads`, to every site the same."""

    def expect_beside(self, server: Memory) -> Mapping[str, State]:
        """Those of the `uploads` that are not like a download of the same name."""

    def network_here(self, context: StepContext, w_g: State, data: SiteData) -> nn.Module:
        """The network that a site scores, and trains, when it receives w_g."""

    def update(self, network: nn.Module, here: SiteRound) -> Update:
        """Train a site's network, which may be changed in place."""

    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """The server's memory with the next w_g."""


class Train(Part):
    """The rounds of training."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.slot = Slot("train", Shared())

    @override
    def begin(self, context: StepContext, server: Memory) -> Memory:
        """w_g of round 0, from the run's seed."""
        return self.slot.write(server, Shared(self.learner.first_weights(context.generator("weights"))))

    @override
    def plan(self) -> Plan:
        learner = self.learner
        downloads, uploads = (WEIGHTS, *learner.downloads), (WEIGHTS, *learner.uploads, SCORES)
        return (
            Phase(
                "train",
                learner.config.rounds,
                downloads,
                uploads,
                self.step,
                self.keep,
                self.send_all,
                learner.expect_beside,
            ),
        )

    @override
    def publish(self, server: Memory) -> Added:
        noted = self.slot.read(server).noted
        return Added(noted.metrics, {"selected_round": noted.round})

    def send(self, server: Memory, site: str) -> Mapping[str, State]:
        """w_g, to every site the same."""
        return {WEIGHTS.name: self.slot.read(server).w_g}

    def send_all(self, server: Memory, site: str) -> Mapping[str, State]:
        """w_g, and what travels beside it."""
        return {**self.send(server, site), **self.learner.send_beside(server)}

    def send_selected(self, server: Memory, site: str) -> Mapping[str, State]:
        """The selected w_g, to every site the same."""
        return {WEIGHTS.name: self.slot.read(server).selected}

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Score w_g, then train from it."""
        network = self.learner.network_here(context, received[WEIGHTS.name], data)
        scored = self.scored(network, data)
        update = self.learner.update(network, SiteRound(context, received, memory, data))
        return ClientResult(
            {**scored.uploads, WEIGHTS.name: update.weights, **update.beside},
            scored.weight,
            update.memory,
            {**scored.metrics, **update.metrics, "loss": update.loss},
        )

    def keep(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Note the scores of the w_g that was sent, then take the next one."""
        return self.learner.average(context, self.note(server, result, context.round), result)

    def scored(self, network: nn.Module, data: SiteData) -> ClientResult:
        """What a site says of a network: its score on the validation patients."""
        config = self.learner.config
        score = evaluate(network, data.val, len(self.learner.task.classes), config.batch_size)
        weight = weight_of(data, config.aggregation)
        return ClientResult({SCORES.name: score.state()}, weight, metrics=score.metrics(self.learner.metric))

    def note(self, server: Memory, result: RoundResult, rounds_done: int) -> Memory:
        """The server's memory with the scores of its w_g, which has so many rounds of training behind it."""
        config, metric = self.learner.config, self.learner.metric
        return self.slot.write(server, self.slot.read(server).after(result, config, metric, rounds_done))

    def moved(self, server: Memory, weights: State) -> Memory:
        """The server's memory with another w_g."""
        return self.slot.write(server, replace(self.slot.read(server), w_g=weights))

    def answers(self, context: StepContext, weights: State) -> Predict:
        """The answers of the network with these weights."""
        network = network_of(self.learner.network, weights, context.device)
        return predicting(network, self.learner.config.batch_size)


class Validate(Part):
    """The score of the model after the last round, which no round has."""

    def __init__(self, train: Train) -> None:
        self.train = train

    @override
    def plan(self) -> Plan:
        send = self.train.send
        return (Phase("validate", 1, (WEIGHTS,), (SCORES,), self.step, self.keep, send, everyone=True),)

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Score the w_g of the last round."""
        return self.train.scored(self.train.learner.network_here(context, received[WEIGHTS.name], data), data)

    def keep(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the w_g of the last round if it is the best."""
        learner = self.train.learner
        left = reduce(lambda memory, slot: slot.clear(memory), learner.while_training, server)
        return self.train.note(left, result, learner.config.rounds)
