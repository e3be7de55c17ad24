"""A routing space as the worker computes with it: its models loaded, and the masks of one network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_store.artefact import Artefact
from model_store.manifest import WEIGHTS, ModelManifest, RoutingSpaceManifest
from model_store.store import Store
from model_store.task import Task
from personalization.cancellation import CancelCheck
from personalization.iop_fl.network import batches
from personalization.iop_fl.space import RoutingSpace
from personalization.playbook import FILE, Playbook
from personalization.state import State, from_safetensors
from personalization.test_time.recipe import BATCH


@dataclass(frozen=True)
class LoadedSpace:
    """A routing space artefact, `offered`, with its playbook, and its global model with its manifest."""

    offered: Artefact[RoutingSpaceManifest]
    global_model: Artefact[ModelManifest]
    manifest: ModelManifest
    space: RoutingSpace
    playbook: Playbook | None

    @property
    def task(self) -> Task:
        """Task of the routing space."""
        return self.manifest.task


def load_space(store: Store, offered: Artefact[RoutingSpaceManifest]) -> LoadedSpace:
    """Load the models of a routing space.

    Raises:
        StoreError: one of them is missing, withdrawn, damaged or of another kind.
        StateError: the models do not fit each other.
    """
    global_model = store.by_digest(offered.manifest.global_model, ModelManifest)
    manifest = global_model.manifest
    inside = {site: _state(store.by_digest(part)) for site, part in offered.manifest.inside.items()}
    space = RoutingSpace.of(manifest.network.name, manifest.network.arguments, inside, _state(global_model))
    content = offered.read(FILE) if FILE in offered.manifest.files else None
    playbook = None if content is None else Playbook.model_validate_json(content)
    return LoadedSpace(offered, global_model, manifest, space, playbook)


def _state(artefact: Artefact) -> State:
    return from_safetensors(artefact.read(WEIGHTS))


def class_maps(
    network: nn.Module, images: Tensor, device: torch.device, check_cancelled: CancelCheck
) -> NDArray[np.uint8]:
    """Compute class indices [N, H, W] of a plain network with its running statistics, as in serving."""
    network = network.to(device).eval()
    maps = []
    with torch.no_grad():
        for batch in batches(images, BATCH):
            check_cancelled()
            maps.append(network(batch.to(device)).argmax(dim=1).to(torch.uint8).cpu().numpy())
    return np.concatenate(maps)
