"""One step at one site: what every engine does around a method's `client_step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from training.algorithm import Algorithm, Memory, Phase, State, StepContext
from training.engine.egress import Outgoing, SiteSpec, let_out
from training.engine.seeds import generator, keyed


@dataclass(frozen=True)
class RunEnvironment:
    """What a run gives every step: its seed, its device, and threads per site (never per machine)."""

    seed: int
    device: str = "cpu"
    threads: int = 1

    def context(self, phase: str, round_: int, rounds: int, site: str | None = None) -> StepContext:
        """The context of one step; the server's has no site."""

        def draw(purpose: str) -> torch.Generator:
            return generator(self.seed, phase, round_, site or "", purpose)

        return StepContext(phase, round_, rounds, torch.device(self.device), draw, site)


def run_step(
    algorithm: Algorithm[Any],
    phase: Phase,
    context: StepContext,
    site: SiteSpec,
    received: Mapping[str, State],
    memory: Memory,
    data: Any,
    key: Callable[[], bytes],
) -> tuple[Outgoing, Memory | None]:
    """One client step within the site's own bounds, and its egress policy over what it sends. Raises as they
    do. `key` gives the site's own, if there is noise to draw from it."""

    def noise(purpose: str) -> np.random.Generator:
        return keyed(key(), phase.name, context.round, site.name, purpose)

    context = replace(context, bounds=site.bounds, noise=noise)
    result = algorithm.client_step(context, received, memory, data)
    return let_out(phase, site, result), result.memory
