"""Local-only: every site trains by itself, as FedAvg's sites do, and nothing is averaged.

The measure of what a federation is worth to a site: the same rounds, steps and schedule as in FedAvg, from a
draw of its own. A site validates its model at the start of every round and after the last, and keeps the best
one, or the last one (`selection: last`).

Shared:  once, summary statistics of the training scans. In the phase `export`, and only at sites that
         consent: the site's model and its score.
Stays:   everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from training.algorithm import ClientResult, Memory, Phase, RoundResult, ServerStage, State, StepContext
from training.methods.common.data_statistics import DESCRIBE
from training.methods.common.export import EXPORT
from training.methods.common.local_training import AnySiteData
from training.methods.common.personal_parts import PersonalFedAvg
from training.methods.fedavg import WEIGHTS, FedAvgConfig
from training.methods.registry import register


@register("local-only", FedAvgConfig, kinds=("segmentation", "classification"))
class LocalOnly(PersonalFedAvg):
    """FedAvg of nothing: the whole network is the site's own."""

    def is_own(self, name: str) -> bool:  # noqa: ARG002
        """Every tensor is."""
        return True

    def plan(self) -> tuple[Phase | ServerStage, ...]:
        """Describe, train, validate the models after the last round, and the consented export."""
        return (
            DESCRIBE,
            Phase("train", self.config.rounds, (), ()),
            Phase("validate", 1, (), (), everyone=True),
            EXPORT,
        )

    def initial(self, context: StepContext) -> Memory:  # noqa: ARG002
        """Nothing: each site draws its weights itself."""
        return Memory()

    def client_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """FedAvg's step from the site's own weights, which stay."""
        if context.phase in ("train", "validate"):
            received = {WEIGHTS.name: {}}
        result = super().client_step(context, received, memory, data)
        uploads = {name: state for name, state in result.uploads.items() if name != WEIGHTS.name}
        return replace(result, uploads=uploads)

    def server_step(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep what the sites describe and export."""
        return (
            server if context.phase in ("train", "validate") else super().server_step(context, server, result)
        )
