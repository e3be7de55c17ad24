"""The export of personal models: a site that consents sends its own to be published.

Shared:  the site's whole model, and its score on the site's validation patients; only with consent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from typing_extensions import override

from model_store.manifest import NetworkSpec
from training.algorithm import (
    ClientResult,
    Group,
    Memory,
    ModelDraft,
    Phase,
    Plan,
    RoundResult,
    State,
    StepContext,
)
from training.local.scores import ValidationScore
from training.local.site import SiteData
from training.parts.part import Part, Slot
from training.parts.test import Test

PERSONAL = Group("personal", "weights", "collect")
PERSONAL_SCORE = Group(
    "personal_score", "statistics", "collect", essential=False, check=ValidationScore.check
)
EXPORT = "export"


@dataclass(frozen=True)
class Exported:
    """The models of the sites that delivered one, and what each scores on its site's validation patients, as
    it travels."""

    models: Mapping[str, State] = field(default_factory=dict)
    scores: Mapping[str, State] = field(default_factory=dict)


class Score(Protocol):
    """A score that can travel."""

    def state(self) -> State:
        """As it travels."""

    def metrics(self, name: str, /) -> dict[str, float]:
        """As metrics of this name, or with this prefix."""


class Export(Part):
    """One phase, of the sites that consent.

    `own` finds the model, and its score, in a site's memory; `like` makes a state like it. The score travels
    as the metric `watched`, and is published as `published`, beside the site's scores of `test`.
    """

    score = PERSONAL_SCORE

    def __init__(
        self,
        own: Callable[[Memory], tuple[State, Score]],
        like: Callable[[Memory], State],
        test: Test,
        *,
        watched: str = "personal_val_dice",
        published: str = "val_dice",
    ) -> None:
        self.own = own
        self.like = like
        self.test = test
        self.watched = watched
        self.published = published
        self.slot = Slot(EXPORT, Exported())

    @override
    def plan(self) -> Plan:
        return (
            Phase(
                EXPORT,
                1,
                (),
                (PERSONAL, self.score),
                self.step,
                self.keep,
                expected=self.expect,
                consent=True,
                everyone=True,
            ),
        )

    def expect(self, server: Memory) -> Mapping[str, State]:
        """An exported model is a whole network."""
        return {PERSONAL.name: self.like(server)}

    def step(
        self,
        context: StepContext,
        received: Mapping[str, State],
        memory: Memory,
        data: SiteData,
    ) -> ClientResult:
        """Send the site's model. Raises SiteFailed at a site without one."""
        model, score = self.own(memory)
        uploads = {PERSONAL.name: model, self.score.name: score.state()}
        return ClientResult(uploads, weight=1.0, metrics=score.metrics(self.watched))

    def keep(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the models."""
        models, scores = result.collected[PERSONAL.name], result.collected.get(self.score.name, {})
        return self.slot.write(server, Exported(models, scores))

    def drafts(self, server: Memory, network: NetworkSpec) -> tuple[ModelDraft, ...]:
        """The exported models, ready to be published, each with what it scores at its site."""
        return tuple(
            ModelDraft("inside", network, model, site, self.metrics(server, site))
            for site, model in self.slot.read(server).models.items()
        )

    def metrics(self, server: Memory, site: str) -> dict[str, float]:
        """What a site's exported model scores on the site's validation and test patients."""
        sent = self.slot.read(server).scores
        score = self.received(sent[site]).metrics(self.published) if site in sent else {}
        return score | self.test.metrics(server, "personal", (site,))

    def received(self, state: State) -> Score:
        """The score that a site sent."""
        return ValidationScore.received(state)
