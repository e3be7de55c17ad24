"""The routing space of a job, out of the store, every weight checked on the way."""

from __future__ import annotations

from dataclasses import dataclass

from model_store.artefact import Artefact
from model_store.manifest import WEIGHTS, ModelManifest, RoutingSpaceManifest
from model_store.store import Store
from model_store.task import Task
from personalization.routing.space import RoutingSpace
from personalization.state import State, from_safetensors
from service.errors import AdaptationRefused


@dataclass(frozen=True)
class LoadedSpace:
    """`offered` is the routing space's artefact; `global_model` and `manifest` are its global part's."""

    offered: Artefact
    global_model: Artefact
    manifest: ModelManifest
    space: RoutingSpace

    @property
    def task(self) -> Task:
        """What is segmented."""
        return self.manifest.task


def load_space(store: Store, digest: str) -> LoadedSpace:
    """The routing space with this digest.

    Raises:
        StoreError: it or one of its models is absent, withdrawn or damaged.
        StateError: its models do not fit each other.
        AdaptationRefused: the artefact is of another kind.
    """
    offered = store.by_digest(digest)
    if not isinstance(offered.manifest, RoutingSpaceManifest):
        raise AdaptationRefused(
            f"'{offered}' is of kind {offered.manifest.kind}; only a routing-space can be adapted here"
        )
    global_model = store.by_digest(offered.manifest.global_model)
    manifest = global_model.manifest
    assert isinstance(manifest, ModelManifest)
    inside = {site: _state(store.by_digest(part)) for site, part in offered.manifest.inside.items()}
    space = RoutingSpace.of(manifest.network.name, manifest.network.arguments, inside, _state(global_model))
    return LoadedSpace(offered, global_model, manifest, space)


def _state(artefact: Artefact) -> State:
    return from_safetensors(artefact.read(WEIGHTS))
