"""Run one federation in a folder of its own, by training's engine: shared by the benchmarks' arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from training.algorithm import Algorithm
from training.engine.client import RunEnvironment
from training.engine.egress import SiteSpec
from training.engine.engine import FederationEngine, RunOutcome
from training.engine.folder import RunFolder

Data = TypeVar("Data")


def federate(
    algorithm: Algorithm,
    sites: Sequence[SiteSpec],
    environment: RunEnvironment,
    work: Path,
    identity: Mapping[str, Any],
    workers: int = 0,
) -> RunOutcome:
    """Run a federation in `work`, or resume the one that is there.

    With 0 `workers` this process does the sites' steps. `identity` must be that of a run found in `work`.
    Raises RuntimeError when a site drops out: arms trained on different sites cannot be compared.
    """
    folder = RunFolder(work)
    folder.claim(identity, resume=True)
    outcome = FederationEngine(algorithm, sites, environment, folder, workers=workers).run()
    for entry in outcome.history:
        if entry.dropped:
            raise RuntimeError(f"{work}: a site dropped out, arms cannot be compared: {entry.dropped}")
    return outcome


def in_memory(data: Mapping[str, Any]) -> list[SiteSpec]:
    """Sites with their data in memory; every site consents to its export."""
    return [SiteSpec(site, partial(_same, own), consents=True) for site, own in data.items()]


def _same(data: Data) -> Data:
    return data
