"""A routing space as the worker computes with it: its models loaded, and the masks of one network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_store.artefact import Artefact
from model_store.manifest import WEIGHTS, ModelManifest
from model_store.store import Store
from model_store.task import Task
from personalization.cancellation import CancelCheck
from personalization.dose import FILE, Playbook
from personalization.export import to_onnx
from personalization.iop_fl.network import MOST_VOXELS_LEARNED, at_once, batches
from personalization.iop_fl.space import GLOBAL, RoutingSpace
from personalization.iop_fl.spread import FILE as SPREAD
from personalization.iop_fl.spread import Spread
from personalization.networks.registry import check_origin
from personalization.options.masks import MASKS
from personalization.options.presets import FOR_COHORTS, PRESETS
from personalization.state import State, from_safetensors
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import BATCH, movable_in
from service.errors import AdaptationRejected
from service.kinds import kind_of


@dataclass(frozen=True)
class LoadedSpace:
    """An artefact, `offered`, and its global model with its manifest: a routing space, or one model.

    `playbook` is what the members practised, `spread` how far they are apart; None of an artefact without.
    """

    offered: Artefact
    global_model: Artefact[ModelManifest]
    manifest: ModelManifest
    space: RoutingSpace
    playbook: Playbook | None
    spread: Spread | None

    @property
    def task(self) -> Task:
        """Task of the models."""
        return self.manifest.task

    def suits(self, preset: str) -> bool:
        """Whether there is what a preset moves: layers of the network, or other models to weigh."""
        weighs = PRESETS[preset].models == "all"
        return movable_in(self.space.outline()).suits(preset) and not (
            weighs and self.space.names == (GLOBAL,)
        )


def load_space(store: Store, offered: Artefact) -> LoadedSpace:
    """Load the global model of an artefact, and those of its members.

    Raises:
        StoreError: one of them is missing, withdrawn, damaged or of another kind.
        StateError: the models do not fit each other.
        AdaptationRejected: it has no global model.
        NetworkError: the package that has their network is not installed here, or in another version.
    """
    parts = kind_of(offered).parts(offered)
    if parts.global_model is None:
        raise AdaptationRejected(f"'{offered}' has no global model to start from")
    global_model = store.by_digest(parts.global_model, ModelManifest)
    manifest = global_model.manifest
    check_origin(manifest.network.name, manifest.network.origin)
    inside = {site: _state(store.by_digest(part)) for site, part in parts.members.items()}
    space = RoutingSpace.of(manifest.network.name, manifest.network.arguments, inside, _state(global_model))
    files = offered.manifest.files
    playbook = Playbook.model_validate_json(offered.read(FILE)) if FILE in files else None
    spread = Spread.model_validate_json(offered.read(SPREAD)) if SPREAD in files else None
    return LoadedSpace(offered, global_model, manifest, space, playbook, spread)


def _state(artefact: Artefact) -> State:
    return from_safetensors(artefact.read(WEIGHTS))


def graph_of(network: nn.Module, task: Task) -> bytes:
    """Export a network for its task, as training does (onnx). Raises ExportError, NetworkError."""
    return to_onnx(network, task.in_channels, task.input_shape, logits=task.averages_logits)


def configured(options: Mapping[str, Any], task: Task) -> AdaptationConfig:
    """The recipe with these options; of patches it learns from as many at once as fit in memory.

    Raises AdaptationError.
    """
    config = AdaptationConfig(**options)
    fits = at_once(config.batch_size, task.input_shape, MOST_VOXELS_LEARNED)
    return config if fits == config.batch_size else config.model_copy(update={"batch_size": fits})


def unsuited(preset: str, loaded: LoadedSpace, among: Sequence[str]) -> AdaptationRejected:
    """Say what a preset needs that is not there, and which of the presets have what they need."""
    suited = [each for each in among if loaded.suits(each)]
    if among is FOR_COHORTS:
        suited.append(f"{MASKS} (with masks of some scans)")
    return AdaptationRejected(movable_in(loaded.space.outline()).refusal(preset, suited))


def class_maps(
    network: nn.Module, images: Tensor, device: torch.device, check_cancelled: CancelCheck
) -> NDArray[np.uint8]:
    """Compute class indices [N, H, W] of a plain network with its running statistics, as in serving.

    Of patches of volumes [N, X, Y, Z], without the average over windows that overlap.
    """
    network = network.to(device).eval()
    maps = []
    with torch.no_grad():
        for batch in batches(images, BATCH):
            check_cancelled()
            maps.append(network(batch.to(device)).argmax(dim=1).to(torch.uint8).cpu().numpy())
    return np.concatenate(maps)
