"""Local-only: every site trains by itself, as FedAvg's sites do, and nothing is averaged.

The measure of what a federation is worth to a site: the same rounds, steps and schedule as in FedAvg, from a
draw of its own. A site validates its model at the start of every round and after the last, and keeps the best
one, or the last one (`selection: last`).

Shared:  once, summary statistics of the training scans, and the scores of the site's model on test and
         validation patients. In the phase `export`, and only at sites that consent: the site's model and its
         score.
Stays:   everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from typing_extensions import override

from training.algorithm import ClientResult, Memory, Phase, State, StepContext, keep_memory, send_nothing
from training.local.scores import AnySiteData
from training.methods.fedavg import WEIGHTS, FedAvgConfig
from training.methods.personal_parts import PersonalFedAvg
from training.methods.registry import register


@register("local-only", FedAvgConfig, kinds=("segmentation", "classification"))
class LocalOnly(PersonalFedAvg):
    """FedAvg of nothing: the whole network is the site's own."""

    @override
    def is_own(self, name: str) -> bool:
        return True

    @override
    def train_phase(self) -> Phase:
        """Nothing travels, and the server does nothing."""
        return _alone(super().train_phase())

    @override
    def validate_phase(self) -> Phase:
        """Nothing travels, and the server does nothing."""
        return _alone(super().validate_phase())

    @override
    def initial(self, context: StepContext) -> Memory:
        """Nothing: each site draws its weights itself."""
        return Memory()

    @override
    def train_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Train from the site's own weights, which stay."""
        result = super().train_step(context, {WEIGHTS.name: {}}, memory, data)
        return replace(result, uploads={})

    @override
    def validate_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Validate the site's own weights."""
        return super().validate_step(context, {WEIGHTS.name: {}}, memory, data)


def _alone(phase: Phase) -> Phase:
    return replace(phase, downloads=(), uploads=(), server_step=keep_memory, broadcast=send_nothing)
