"""Run one client step of a method at one site. Every engine calls the steps of phases through this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from training.algorithm import Memory, Phase, State, StepContext
from training.engine.egress import Outgoing, SiteSpec, let_out
from training.engine.folder import SiteFolder
from training.engine.release import digest_of, with_noise
from training.engine.seeds import generator, keyed

# Equal steps give equal bits, and float32 is float32: a product in TF32 has 10 bits of mantissa.
_CUDNN_MODE = {"benchmark": False, "deterministic": True, "allow_tf32": False}


@dataclass(frozen=True)
class RunEnvironment:
    """Settings of a run that every step gets: seed, device, and threads per site (never per machine)."""

    seed: int
    device: str = "cpu"
    threads: int = 1

    def apply(self) -> None:
        """Set the threads and the deterministic mode of torch in a process that runs steps."""
        torch.set_num_threads(self.threads)
        for name, value in _CUDNN_MODE.items():
            setattr(torch.backends.cudnn, name, value)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run a block in that mode, and restore the process's own after it.

        The order of a sum, and so the result, may depend on both.
        """
        threads = torch.get_num_threads()
        before = {name: getattr(torch.backends.cudnn, name) for name in _CUDNN_MODE}
        self.apply()
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(torch.backends.cudnn, name, value)
            torch.set_num_threads(threads)

    def context(self, phase: str, round_: int, rounds: int, site: str | None = None) -> StepContext:
        """Build the context of one step. The context of a server step has no site."""

        def draw(purpose: str) -> torch.Generator:
            return generator(self.seed, phase, round_, site or "", purpose)

        return StepContext(phase, round_, rounds, torch.device(self.device), draw, site)


def run_step(
    phase: Phase,
    context: StepContext,
    site: SiteSpec,
    received: Mapping[str, State],
    memory: Memory,
    data: Any,
    own: SiteFolder,
) -> tuple[Outgoing, Memory | None]:
    """Run one client step with the site's feature bounds, then apply its egress policy and privacy.

    `own` is the site's private folder. Its key is made only if the step draws noise.
    Raises what `client_step`, `let_out` and `with_noise` raise.
    """

    def noise(purpose: str, content: State, deviation: float) -> np.random.Generator:
        hidden = digest_of([deviation], content)
        return keyed(own.key(), phase.name, context.round, site.name, purpose, hidden)

    context = replace(context, bounds=site.bounds, noise=noise)
    result = phase.client_step(context, received, memory, data)
    outgoing = let_out(phase, site, result)
    return with_noise(phase, context.round, site, received, outgoing, own), result.memory
