"""A job of kind `adaptation`: who does it, by the kind of the artefact that it begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from model_store.store import Store
from service.adaptation.attempt import Attempt
from service.adaptation.joining import run_joining
from service.adaptation.outcome import Outcome
from service.adaptation.picking import run_picking
from service.adaptation.routing import run_routing
from service.errors import AdaptationRefused

# As `service.kinds.ADAPTABLE` says to the API what can be asked for.
BY_PARENT: Mapping[str, Callable[[Attempt], Outcome]] = {
    "routing-space": run_routing,
    "cross-attention": run_joining,
    "clusters": run_picking,
}


def run_adaptation(attempt: Attempt) -> Outcome:
    """Make the hospital's own version. Raises what the work raises; the runner turns that into words."""
    parent = Store(attempt.settings.store).by_digest(attempt.job.parent)
    kind = parent.manifest.kind
    if kind not in BY_PARENT:
        raise AdaptationRefused(
            f"'{parent}' is a {kind}; only these can be adapted to a hospital: {', '.join(BY_PARENT)}"
        )
    return BY_PARENT[kind](attempt)
