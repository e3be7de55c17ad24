"""A job of kind `adaptation`: who does it, by the kind of the artefact that it begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from model_store.store import Store
from service.catalog.adapted import adapted_name
from service.errors import AdaptationRejected
from service.worker import clusters, cross_attention, routing_space
from service.worker.attempt import Attempt, AttemptOutcome, PublishedCandidate
from service.worker.candidate import published_by


@dataclass(frozen=True)
class AdaptationTask:
    """What makes a candidate, and how it says that its best is where it began."""

    run: Callable[[Attempt], PublishedCandidate]
    fallback_reason: str = ""


# As `service.kinds.ADAPTABLE` says to the API what can be asked for.
BY_PARENT: Mapping[str, AdaptationTask] = {
    "routing-space": AdaptationTask(routing_space.run_routing, routing_space.NOTHING_BETTER),
    "cross-attention": AdaptationTask(cross_attention.run_joining, cross_attention.NOTHING_BETTER),
    "clusters": AdaptationTask(clusters.run_picking),
}


def run_adaptation(attempt: Attempt) -> AttemptOutcome:
    """Make the hospital's own version. Raises what the work raises; the runner turns that into words."""
    attempt.set_stage("preparing")
    store, job = Store(attempt.settings.store), attempt.job
    parent = store.by_digest(job.parent)
    kind = parent.manifest.kind
    if kind not in BY_PARENT:
        raise AdaptationRejected(
            f"'{parent}' is of kind {kind}; only these can be adapted to a hospital: {', '.join(BY_PARENT)}"
        )
    work = BY_PARENT[kind]
    assert job.hospital is not None
    earlier = published_by(store, adapted_name(parent.name, job.hospital), job.id)
    # Found, an attempt before this one died between publishing and saying so.
    made = work.run(attempt) if earlier is None else PublishedCandidate(earlier, job.result or {}, job.gate)
    return made.outcome(work.fallback_reason)
