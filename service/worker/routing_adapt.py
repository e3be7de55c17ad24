"""Route, adapt and merge: one test-time adaptation of a routing space on the worker's device."""

from __future__ import annotations

from collections.abc import Callable
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
from personalization.iop_fl.merge import merge
from personalization.iop_fl.network import batches, route
from personalization.iop_fl.space import RoutingSpace
from personalization.state import State, from_safetensors
from personalization.test_time.adapt import Adaptation, adapt, space_for
from personalization.test_time.checkpoint import AdaptationCheckpoint
from personalization.test_time.config import AdaptationConfig


@dataclass(frozen=True)
class LoadedSpace:
    """A routing space artefact, `offered`, with the artefact and `manifest` of its global model."""

    offered: Artefact[RoutingSpaceManifest]
    global_model: Artefact[ModelManifest]
    manifest: ModelManifest
    space: RoutingSpace

    @property
    def task(self) -> Task:
        """Task of the routing space."""
        return self.manifest.task


def load_space(store: Store, digest: str) -> LoadedSpace:
    """Load the routing space with this digest.

    Raises:
        StoreError: the artefact or one of its models is missing, withdrawn, damaged or of another kind.
        StateError: the models do not fit each other.
    """
    offered = store.by_digest(digest, RoutingSpaceManifest)
    global_model = store.by_digest(offered.manifest.global_model, ModelManifest)
    manifest = global_model.manifest
    inside = {site: _state(store.by_digest(part)) for site, part in offered.manifest.inside.items()}
    space = RoutingSpace.of(manifest.network.name, manifest.network.arguments, inside, _state(global_model))
    return LoadedSpace(offered, global_model, manifest, space)


def _state(artefact: Artefact) -> State:
    return from_safetensors(artefact.read(WEIGHTS))


# Images per forward pass outside training; limits memory use. It affects only the coefficients of pooled
# routers, which depend on the statistics of their batch.
_BATCH = 16


@dataclass(frozen=True)
class Adapted:
    """An adapted network: `routed` over `space` at its chosen epoch, `merged` into the plain served one."""

    adaptation: Adaptation
    space: RoutingSpace
    routed: nn.Module
    merged: nn.Module


def adapt_and_merge(
    space: RoutingSpace,
    images: Tensor,
    config: AdaptationConfig,
    device: torch.device,
    check_cancelled: CancelCheck,
    *,
    resume: AdaptationCheckpoint | None = None,
    after_epoch: Callable[[nn.Module, AdaptationCheckpoint], None] | None = None,
) -> Adapted:
    """Adapt to `images` [N, C, H, W] deterministically.

    Raises what `adapt`, `check_cancelled` and `after_epoch` raise.
    """
    space = space_for(config, space)
    network = route(space, config.router).to(device)
    images = images.to(device)

    def note(checkpoint: AdaptationCheckpoint) -> None:
        if after_epoch is not None:
            after_epoch(network, checkpoint)

    adaptation = adapt(
        network, images, config, resume=resume, after_epoch=note, check_cancelled=check_cancelled
    )
    merged = merge(space, network, images, batch_size=_BATCH, check_cancelled=check_cancelled)
    return Adapted(adaptation, space, network, merged)


def class_maps(
    network: nn.Module, images: Tensor, device: torch.device, check_cancelled: CancelCheck
) -> NDArray[np.uint8]:
    """Compute class indices [N, H, W] of a plain network with its running statistics, as in serving."""
    network = network.to(device).eval()
    maps = []
    with torch.no_grad():
        for batch in batches(images, _BATCH):
            check_cancelled()
            maps.append(network(batch.to(device)).argmax(dim=1).to(torch.uint8).cpu().numpy())
    return np.concatenate(maps)
