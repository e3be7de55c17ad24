"""Plan a federation: run the round of fingerprints on an engine, and propose a task and a network from it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from training.algorithm import Publication
from training.config import RunConfig
from training.data.cases import Federation, digest_of_sites
from training.engine.history import RoundEntry
from training.engine.pool import Pool
from training.errors import ConfigurationError
from training.methods.planning import FINGERPRINT, PlanningConfig
from training.methods.registry import method
from training.planning.fingerprint import LEAST_PATIENTS, summary
from training.planning.planner import Budget
from training.planning.proposal import Proposal, Told, propose
from training.run import Run, execute

METHOD = "plan"


def planning_run(federation: Federation[Any], settings: RunConfig) -> Run:
    """The run that plans for a run with these settings: same patients, same policies, no noise on weights."""
    task = federation.task
    if task.kind not in method(METHOD).kinds:
        raise ConfigurationError(
            "the plan cannot be made",
            [f"'{task.name}' is a {task.kind}; a plan is for the segmentation of volumes"],
        )
    return Run(federation, METHOD, PlanningConfig(), settings_of(settings))


def settings_of(settings: RunConfig) -> RunConfig:
    """Settings of the round of fingerprints, in which every site takes part and sends no weights."""
    return settings.model_copy(update={"privacy": None, "participation": 1.0})


def plan_federation(
    federation: Federation[Any],
    settings: RunConfig,
    budget: Budget,
    folder: Path,
    *,
    resume: bool = False,
    dimensions: Literal[2, 3] | None = None,
    workers: int | None = 0,
    pool: Pool | None = None,
    quorum: int | None = None,
) -> Proposal:
    """Ask the sites for their fingerprints, and plan.

    `folder` keeps the round; with `resume`, a finished one is not repeated. `pool` has hospitals on a
    network, and its own `quorum`. Raises TrainingError: of data that cannot be read, and of a federation in
    which no site tells enough.
    """
    run = planning_run(federation, settings)
    if not resume and pool is None:
        shutil.rmtree(folder, ignore_errors=True)
    result = execute(run, folder, workers=workers, resume=True, pool=pool, quorum=quorum)
    server = result.publication.exhibits
    facts = server.facts
    told = _told(result.history, tuple(facts.get("sites", ())), str(facts.get("capped", "")))
    if not server.tensors:
        raise ConfigurationError(
            "the plan cannot be made: no site tells what its volumes are like",
            [
                *(f"site '{site}': {why}" for site, why in told.silent.items()),
                "write a task with a geometry by hand, and give it with --task in place of --plan",
            ],
        )
    return propose(summary(server.tensors), federation.task, budget, told, dimensions)


def replanned(federation: Federation[Any], proposal: Proposal) -> Federation[Any]:
    """The federation with the planned task. Its files were checked by the labels, which stay the same."""
    digest = digest_of_sites(proposal.task, federation.sites)
    return replace(federation, task=proposal.task, digest=digest)


def with_plan(publication: Publication, proposal: Proposal) -> Publication:
    """The publication with the plan in its details: in the record, and in the lineage of artefacts."""
    return replace(publication, details={**publication.details, "plan": proposal.content()})


def _told(history: Sequence[RoundEntry], sites: tuple[str, ...], capped: str) -> Told:
    (entry,) = history
    silent = {
        site: "its policy refuses statistics"
        if FINGERPRINT in part.withheld
        else f"it has fewer than {LEAST_PATIENTS} training patients, or than its own minimum"
        for site, part in entry.sites.items()
        if site not in sites
    }
    return Told(sites, {**silent, **entry.absent, **entry.dropped}, capped)
