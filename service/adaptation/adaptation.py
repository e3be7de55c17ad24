"""A job of kind `adaptation`: who does it, by the kind of the artefact that it begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from model_store.store import Store
from service.adaptation import joining, picking, routing
from service.adaptation.attempt import Attempt
from service.adaptation.candidate import published_by
from service.adaptation.outcome import Outcome, Published
from service.errors import AdaptationRefused
from service.jobs.names import adapted_name


@dataclass(frozen=True)
class Work:
    """What makes a candidate, and how it says that its best is where it began."""

    run: Callable[[Attempt], Published]
    nothing_better: str = ""


# As `service.kinds.ADAPTABLE` says to the API what can be asked for.
BY_PARENT: Mapping[str, Work] = {
    "routing-space": Work(routing.run_routing, routing.NOTHING_BETTER),
    "cross-attention": Work(joining.run_joining, joining.NOTHING_BETTER),
    "clusters": Work(picking.run_picking),
}


def run_adaptation(attempt: Attempt) -> Outcome:
    """Make the hospital's own version. Raises what the work raises; the runner turns that into words."""
    attempt.enter("preparing")
    store, job = Store(attempt.settings.store), attempt.job
    parent = store.by_digest(job.parent)
    kind = parent.manifest.kind
    if kind not in BY_PARENT:
        raise AdaptationRefused(
            f"'{parent}' is of kind {kind}; only these can be adapted to a hospital: {', '.join(BY_PARENT)}"
        )
    work = BY_PARENT[kind]
    assert job.hospital is not None
    earlier = published_by(store, adapted_name(parent.name, job.hospital), job.id)
    # Found, an attempt before this one died between publishing and saying so.
    made = work.run(attempt) if earlier is None else Published(earlier, job.result or {}, job.gate)
    return made.outcome(work.nothing_better)
