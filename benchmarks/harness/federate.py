"""One federation in a folder of its own, by training's own engine: what benchmarks of several arms share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from training.algorithm import Algorithm
from training.engine.client import RunEnvironment
from training.engine.egress import SiteSpec
from training.engine.folder import RunFolder
from training.engine.in_process import InProcessEngine, RunOutcome

Data = TypeVar("Data")


def federate(
    algorithm: Algorithm[Any],
    data: Mapping[str, Any],
    surroundings: RunEnvironment,
    work: Path,
    identity: Mapping[str, Any],
) -> RunOutcome:
    """Run, or resume, a federation over sites whose data are in memory; every site consents to its export.

    The sites' steps are done by this process. `identity` is what a run found in `work` must be of. Raises
    RuntimeError when a site drops out, since arms would not compare.
    """
    folder = RunFolder(work)
    folder.claim(identity, resume=True)
    specs = [SiteSpec(site, partial(_itself, own), consents=True, size=1) for site, own in data.items()]
    outcome = InProcessEngine(algorithm, specs, surroundings, folder, workers=0).run()
    for entry in outcome.history:
        if entry.dropped:
            raise RuntimeError(f"{work}: a site dropped out, arms would not compare: {entry.dropped}")
    return outcome


def _itself(data: Data) -> Data:
    return data
