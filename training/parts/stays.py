"""The rounds of a network of which a part stays at its site.

A site joins its own part to the shared part that it receives, takes the step on the whole network, and splits
the result again. It scores the whole network, chooses by itself, and sends no score.

Shared:  the other part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from typing_extensions import override

from training.algorithm import (
    ClientResult,
    ClientStep,
    Memory,
    Phase,
    Plan,
    State,
    StepContext,
)
from training.local.networks import shapes_of
from training.local.scores import ValidationScore
from training.local.site import SiteData
from training.parts.own import ChooseOwn
from training.parts.part import Added, Slot
from training.parts.train import SCORES, WEIGHTS, Learner, Shared, Train, Validate


@dataclass(frozen=True)
class Own:
    """A site's part of the network; empty before its first training."""

    tensors: State = field(default_factory=dict)


OWN = Slot("stays", Own())


def join_own(received: Mapping[str, State], own: State) -> Mapping[str, State]:
    """What a site received, with its own tensors among the weights."""
    return {**received, WEIGHTS.name: {**received.get(WEIGHTS.name, {}), **own}}


def keep_own(result: ClientResult, memory: Memory, is_own: Callable[[str], bool]) -> ClientResult:
    """A step's result, with the site's own tensors taken out of the weights that it sends.

    They are in the new memory, beside what the step left there, or beside `memory` if it left nothing.
    """
    weights = result.uploads.get(WEIGHTS.name, {})
    own = {name: tensor for name, tensor in weights.items() if is_own(name)}
    if not own:
        return result
    shared = {name: tensor for name, tensor in weights.items() if name not in own}
    after = OWN.write(result.memory or memory, Own(own))
    return replace(result, uploads={**result.uploads, WEIGHTS.name: shared}, memory=after)


class TrainWhole(Train):
    """`Train`, of tensors that are not a site's own; where all are, nothing travels."""

    def __init__(self, learner: Learner, own: ChooseOwn, is_own: Callable[[str], bool]) -> None:
        super().__init__(learner)
        self.own = own
        self.is_own = is_own

    @cached_property
    def alone(self) -> bool:
        """Whether all tensors stay, so that nothing travels."""
        return all(map(self.is_own, shapes_of(self.learner.network)))

    def here(self, steps: Plan) -> Plan:
        """Phases in which no score travels, and nothing at all where a site trains alone."""
        phases = (step for step in steps if isinstance(step, Phase))
        if self.alone:
            return tuple(
                Phase(each.name, each.rounds, (), (), each.client_step, everyone=each.everyone)
                for each in phases
            )
        return tuple(
            replace(each, uploads=tuple(group for group in each.uploads if group is not SCORES))
            for each in phases
        )

    @override
    def begin(self, context: StepContext, server: Memory) -> Memory:
        """The shared part of round 0."""
        drawn = self.learner.first_weights(context.generator("weights"))
        shared = {name: tensor for name, tensor in drawn.items() if not self.is_own(name)}
        return self.slot.write(server, Shared(shared))

    @override
    def plan(self) -> Plan:
        return self.here(super().plan())

    @override
    def publish(self, server: Memory) -> Added:
        """Nothing: a site chooses its round."""
        return Added()

    @override
    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Score and train the site's whole network."""
        return self.whole(super().step, context, received, memory, data, context.round)

    def whole(
        self,
        step: ClientStep,
        context: StepContext,
        received: Mapping[str, State],
        memory: Memory,
        data: SiteData,
        rounds_done: int,
    ) -> ClientResult:
        """The step on the whole network, which is the one to publish if it is the best so far."""
        own = OWN.read(memory).tensors
        received = join_own(received, own or self.first(context))
        result = step(context, received, memory, data)
        uploads = dict(result.uploads)
        score = ValidationScore.received(uploads.pop(SCORES.name))
        if own:
            memory = self.own.choose(memory, received[WEIGHTS.name], score, rounds_done)
        kept = keep_own(replace(result, uploads=uploads, memory=memory), memory, self.is_own)
        return replace(kept, uploads={}) if self.alone else kept

    def first(self, context: StepContext) -> State:
        """The own part of a site that has none yet, from a draw of its own."""
        drawn = self.learner.first_weights(context.generator("personal"))
        return {name: tensor for name, tensor in drawn.items() if self.is_own(name)}


class ValidateWhole(Validate):
    """`Validate`, of the same network."""

    def __init__(self, train: TrainWhole) -> None:
        super().__init__(train)
        self.train: TrainWhole = train

    @override
    def plan(self) -> Plan:
        return self.train.here(super().plan())

    @override
    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Score the site's whole network."""
        rounds = self.train.learner.config.rounds
        return self.train.whole(super().step, context, received, memory, data, rounds)
