"""The clusters of a job, out of the store, every weight checked on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from model_store.artefact import Artefact
from model_store.manifest import WEIGHTS, ClustersManifest, ModelManifest
from model_store.store import Store
from model_store.task import Task
from personalization.networks import build
from personalization.state import from_safetensors
from service.errors import AdaptationRefused


@dataclass(frozen=True)
class LoadedClusters:
    """`offered` is the artefact of kind `clusters`; its models by the clusters' names, in their order."""

    offered: Artefact
    manifest: ClustersManifest
    models: Mapping[str, Artefact]
    networks: Mapping[str, nn.Module]

    @property
    def task(self) -> Task:
        """What is classified."""
        return self.manifest.task

    def model_manifest(self, cluster: str) -> ModelManifest:
        """Of a cluster's model."""
        manifest = self.models[cluster].manifest
        assert isinstance(manifest, ModelManifest)
        return manifest

    def sites(self, cluster: str) -> list[str]:
        """The hospitals of a cluster."""
        return sorted(site for site, found in self.manifest.assignment.items() if found == cluster)


def load_clusters(store: Store, digest: str) -> LoadedClusters:
    """The clusters with this digest.

    Raises:
        StoreError: it or one of its models is absent, withdrawn or damaged.
        StateError: a model's weights are not its network's.
        AdaptationRefused: the artefact is of another kind.
    """
    offered = store.by_digest(digest)
    if not isinstance(offered.manifest, ClustersManifest):
        raise AdaptationRefused(
            f"'{offered}' is of kind {offered.manifest.kind}; expected clusters, as FedBiCross makes them"
        )
    found = offered.manifest.clusters
    # "10" after "9", where names are numbers.
    names = sorted(found, key=lambda name: (len(name), name))
    models = {name: store.by_digest(found[name]) for name in names}
    return LoadedClusters(
        offered, offered.manifest, models, {name: _network(model) for name, model in models.items()}
    )


def _network(model: Artefact) -> nn.Module:
    manifest = model.manifest
    assert isinstance(manifest, ModelManifest)
    network = build(manifest.network.name, **manifest.network.arguments)
    network.load_state_dict(from_safetensors(model.read(WEIGHTS)))
    return network.eval()
