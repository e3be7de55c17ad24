"""Methods in which a part of the network is averaged, and the other part stays at its site.

A site joins its own part to the shared part that it receives, takes the method's step on the whole network,
and splits the result again: `join_own` and `keep_own`, for any method with the group `weights`. Only the
shared part travels.

`PersonalFedAvg` is FedAvg with that. The model of a site after t rounds is the average of the shared parts
after t rounds, joined to the site's part of its last local training. The site validates it on its own
patients when the next round begins, and after the last round. There is no global model: no hospital has
validated one part without the other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace

from typing_extensions import override

from model_store.task import Task
from training.algorithm import (
    ClientResult,
    ClientStep,
    Memory,
    Phase,
    Plan,
    Publication,
    State,
    StepContext,
)
from training.local.scores import AnySiteData, ValidationScore
from training.methods.fedavg import SCORES, WEIGHTS, FedAvgConfig
from training.methods.personal_models import PersonalModels
from training.parts.describe import describe_phase, described
from training.parts.export import export_phase, personal_drafts
from training.parts.judge import PARENT, judge_once, judging_phase
from training.parts.test import score_once, scoring_phase
from training.state_tree import join, part

_OWN = "kept"


def own_part(memory: Memory) -> State:
    """What `keep_own` left in a site's memory; empty before its first training."""
    return part(memory.tensors, _OWN)


def join_own(received: Mapping[str, State], own: State) -> Mapping[str, State]:
    """What a site received, with its own tensors among the weights."""
    if WEIGHTS.name not in received:
        return received
    return {**received, WEIGHTS.name: {**received[WEIGHTS.name], **own}}


def keep_own(result: ClientResult, memory: Memory, is_own: Callable[[str], bool]) -> ClientResult:
    """A step's result, with the site's own tensors taken out of the weights that it sends.

    They are in the new memory, beside what the step left there, or beside `memory` if it left nothing.
    """
    weights = result.uploads.get(WEIGHTS.name, {})
    own = {name: tensor for name, tensor in weights.items() if is_own(name)}
    if not own:
        return result
    shared = {name: tensor for name, tensor in weights.items() if name not in own}
    after = result.memory or memory
    return replace(
        result,
        uploads={**result.uploads, WEIGHTS.name: shared},
        memory=Memory({**after.tensors, **join({_OWN: own})}, after.facts),
    )


class PersonalFedAvg(PersonalModels):
    """FedAvg of the tensors that are not a site's own."""

    def __init__(self, config: FedAvgConfig, task: Task) -> None:
        super().__init__(config, task)
        self.metric = self.personal_metric
        # A site draws its own part.
        config.check_reads_start()

    @abstractmethod
    def is_own(self, name: str) -> bool:
        """Whether a tensor of the network's state stays at its site."""

    @override
    def plan(self) -> Plan:
        """Describe, train, validate the models after the last round, test them, and the consented export."""
        return (
            describe_phase(self.config.aggregation),
            self.train_phase(),
            self.validate_phase(),
            *self.judge_phases(),
            scoring_phase(self.task, (), self.score_step, models=("personal",)),
            export_phase(self.export_step, self.expect_whole),
        )

    @override
    def judge_phases(self) -> tuple[Phase, ...]:
        """The comparison of each site's chosen model with the version that the run started from."""
        if not self.config.is_judged:
            return ()
        return (judging_phase((PARENT,), self.judge_step, self.send_parent),)

    @override
    def judge_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Score the site's chosen model and the parent on the validation patients."""
        parent, own = self.predicting(context, received[PARENT.name]), self.predict_chosen(context, memory)
        return judge_once(parent, own, data, self.classes)

    @override
    def train_phase(self) -> Phase:
        """FedAvg's phase, without scores: a site keeps them."""
        return replace(super().train_phase(), uploads=(WEIGHTS,))

    @override
    def validate_phase(self) -> Phase:
        """FedAvg's phase, without scores: a site keeps them."""
        return replace(super().validate_phase(), uploads=())

    @override
    def initial(self, context: StepContext) -> Memory:
        """The shared part of round 0."""
        drawn = part(super().initial(context).tensors, "global")
        return Memory(join({"global": {name: t for name, t in drawn.items() if not self.is_own(name)}}))

    @override
    def train_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Validate and train the site's whole network."""
        return self._whole(super().train_step, context, received, memory, data, context.round)

    @override
    def validate_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Validate the site's whole network."""
        return self._whole(super().validate_step, context, received, memory, data, self.config.rounds)

    @override
    def score_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Score the site's chosen model on its test patients."""
        return score_once({"personal": self.predict_chosen(context, memory)}, data, self.task)

    def _whole(
        self,
        step: ClientStep,
        context: StepContext,
        received: Mapping[str, State],
        memory: Memory,
        data: AnySiteData,
        rounds_done: int,
    ) -> ClientResult:
        """FedAvg's step on the whole network, which is the one to publish if it is the best so far."""
        own = own_part(memory)
        received = join_own(received, own or self._first(context))
        result = step(context, received, memory, data)
        uploads = dict(result.uploads)
        score = ValidationScore.received(uploads.pop(SCORES.name))
        if own:
            memory = self.choose(memory, received[WEIGHTS.name], score, rounds_done)
        return keep_own(replace(result, uploads=uploads, memory=memory), memory, self.is_own)

    def _first(self, context: StepContext) -> State:
        """The own part of a site that has none yet, from a draw of its own."""
        drawn = self.first_weights(context.generator("personal"))
        return {name: tensor for name, tensor in drawn.items() if self.is_own(name)}

    @override
    def publication(self, server: Memory) -> Publication:
        models = personal_drafts(server, self.network, self.task, self.published_metric)
        judged, statistics = self.judged(server), described(server.facts)
        return Publication("personal-models", models, judged, statistics)
