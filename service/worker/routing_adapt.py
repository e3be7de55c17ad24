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
from personalization.iop_fl.spread import FILE as SPREAD
from personalization.iop_fl.spread import Spread
from personalization.networks.registry import check_origin
from personalization.playbook import FILE, Playbook
from personalization.state import State, from_safetensors
from personalization.test_time.recipe import BATCH


@dataclass(frozen=True)
class LoadedSpace:
    """A routing space artefact, `offered`, and its global model with its manifest.

    `playbook` is what the members practised, `spread` how far they are apart; None of an artefact without.
    """

    offered: Artefact[RoutingSpaceManifest]
    global_model: Artefact[ModelManifest]
    manifest: ModelManifest
    space: RoutingSpace
    playbook: Playbook | None
    spread: Spread | None

    @property
    def task(self) -> Task:
        """Task of the routing space."""
        return self.manifest.task


def load_space(store: Store, offered: Artefact[RoutingSpaceManifest]) -> LoadedSpace:
    """Load the models of a routing space.

    Raises:
        StoreError: one of them is missing, withdrawn, damaged or of another kind.
        StateError: the models do not fit each other.
        NetworkError: the package that has their network is not installed here, or in another version.
    """
    global_model = store.by_digest(offered.manifest.global_model, ModelManifest)
    manifest = global_model.manifest
    check_origin(manifest.network.name, manifest.network.origin)
    inside = {site: _state(store.by_digest(part)) for site, part in offered.manifest.inside.items()}
    space = RoutingSpace.of(manifest.network.name, manifest.network.arguments, inside, _state(global_model))
    files = offered.manifest.files
    playbook = Playbook.model_validate_json(offered.read(FILE)) if FILE in files else None
    spread = Spread.model_validate_json(offered.read(SPREAD)) if SPREAD in files else None
    return LoadedSpace(offered, global_model, manifest, space, playbook, spread)


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
