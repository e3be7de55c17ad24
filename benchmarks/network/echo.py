"""A method that sends weights to every hospital and back without training, and a hospital that knows it.

python -m benchmarks.network.echo --data FOLDER --kit KIT --policy policy.yaml
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import typer
from pydantic import Field

from model_store.task import Task
from training.algorithm import (
    Algorithm,
    ClientResult,
    Group,
    Memory,
    Phase,
    Publication,
    RoundResult,
    State,
    StepContext,
)
from training.config import MethodConfig
from training.methods.registry import register
from training.site import site

WEIGHTS = Group("weights", "weights", "mean")
TENSORS = 8


class EchoConfig(MethodConfig):
    """How much travels."""

    megabytes: float = Field(4, gt=0)


def weights_of(megabytes: float) -> State:
    """Random float32 tensors of so many megabytes in sum."""
    count = int(megabytes * 1e6 / 4 / TENSORS)
    draw = torch.Generator().manual_seed(0)
    return {f"w{index}": torch.randn(count, generator=draw) for index in range(TENSORS)}


class EchoWeights(Algorithm):
    """Weights to every site and back; the server takes their mean."""

    def __init__(self, config: EchoConfig, task: Task) -> None:  # noqa: ARG002
        self._config = config

    def plan(self) -> tuple[Phase, ...]:
        """Rounds of an echo."""
        rounds = self._config.rounds
        return (Phase("echo", rounds, (WEIGHTS,), (WEIGHTS,), self.give_back, self.keep_mean, self.send),)

    def initial(self, context: StepContext) -> Memory:  # noqa: ARG002
        """Make random weights."""
        return Memory(weights_of(self._config.megabytes))

    def send(self, server: Memory, site: str) -> Mapping[str, State]:  # noqa: ARG002
        """Send the same tensors to all."""
        return {WEIGHTS.name: server.tensors}

    def give_back(
        self,
        context: StepContext,  # noqa: ARG002
        received: Mapping[str, State],
        memory: Memory,  # noqa: ARG002
        data: Any,  # noqa: ARG002
    ) -> ClientResult:
        """Return what was received."""
        return ClientResult({WEIGHTS.name: received[WEIGHTS.name]}, 1.0)

    def keep_mean(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:  # noqa: ARG002
        """Keep the mean."""
        return Memory(dict(result.reduced[WEIGHTS.name]))

    def publication(self, server: Memory) -> Publication:  # noqa: ARG002
        """Publish nothing."""
        return Publication("none", ())


def enlist() -> None:
    """Register the method in this process. Not on import: it is no method of Locum."""
    register("echo", EchoConfig)(EchoWeights)


if __name__ == "__main__":
    enlist()
    typer.run(site)
