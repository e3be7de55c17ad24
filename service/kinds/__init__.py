"""The kinds of artefact that a job can fit to a hospital: one module each, and this table.

What a worker does for each is in `service.worker.registry`; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from model_store.artefact import Artefact
from service.kinds.clusters import CLUSTERS
from service.kinds.cross_attention import CROSS_ATTENTION
from service.kinds.kind import AdaptableKind, Words
from service.kinds.routing_space import ROUTING_SPACE

__all__ = ["ADAPTABLE", "AdaptableKind", "Words", "kind_of"]

ADAPTABLE: Mapping[str, AdaptableKind] = {
    kind.name: kind for kind in (ROUTING_SPACE, CROSS_ATTENTION, CLUSTERS)
}


def kind_of(artefact: Artefact) -> AdaptableKind | None:
    """What is special about fitting this artefact to a hospital; None for one that cannot be."""
    return ADAPTABLE.get(artefact.manifest.kind)
