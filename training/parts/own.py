"""A site's own model: which one it publishes.

A site validates its model in every round on its own patients. It keeps the best one (the earlier of equals),
or the last one (`selection: last`). Sites may so publish models of different rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from personalization.state import clone
from training.algorithm import Memory, State, StepContext
from training.errors import SiteFailed
from training.local.networks import network_of, shapes_of
from training.local.scores import ValidationScore
from training.parts.part import Slot
from training.parts.test import Predict, predicting
from training.parts.train import Learner


@dataclass(frozen=True)
class Chosen:
    """A site's model and its score. Any later model replaces one that is `too_early`: see
    `RandomisationConfig.selectable`."""

    model: State = field(default_factory=dict)
    score: ValidationScore = field(default_factory=ValidationScore)
    too_early: bool = False


class ChooseOwn:
    """The choice, in the steps of other parts: the memory that it is kept in is the site's."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.slot = Slot("own", Chosen())

    def choose(self, memory: Memory, model: State, score: ValidationScore, rounds_done: int) -> Memory:
        """The site's memory with its model after so many rounds, if that is the one to publish so far."""
        config, chosen = self.learner.config, self.slot.read(memory)
        keeps_best = config.selection == "best" and not chosen.too_early
        if self.slot.holds(memory) and keeps_best and not score.beats(chosen.score):
            return memory
        return self.slot.write(memory, Chosen(clone(model), score, not config.selectable(rounds_done)))

    def answers(self, context: StepContext, memory: Memory) -> Predict | None:
        """The answers of the chosen model; None at a site that never trained."""
        if not self.slot.holds(memory):
            return None
        network = network_of(self.learner.network, self.slot.read(memory).model, context.device)
        return predicting(network, self.learner.config.batch_size)

    def like(self, server: Memory) -> State:
        """An exported model is a whole network."""
        return shapes_of(self.learner.network)

    def exported(self, memory: Memory) -> tuple[State, ValidationScore]:
        """The chosen model and its score. Raises SiteFailed at a site that never trained."""
        if not self.slot.holds(memory):
            raise SiteFailed("it has no personal model: it took part in no round of training")
        chosen = self.slot.read(memory)
        return chosen.model, chosen.score
