"""Frozen backbones: choose, import and load the model that a FedIns run adapts.

A backbone is a model in the store. Every hospital has it before the run. Each process reads it from the store
and verifies its digest; the federation's messages never contain it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from model_store.artefact import Artefact
from model_store.errors import LocumStoreError, StoreError
from model_store.manifest import (
    GRAPH,
    WEIGHTS,
    ImportedWeights,
    Lineage,
    ModelManifest,
    NetworkSpec,
    RoutingSpaceManifest,
)
from model_store.store import Store
from model_store.task import Task, TaskKind
from personalization.errors import NetworkError
from personalization.export import to_onnx
from personalization.networks import Backbone, build_backbone, outline
from personalization.networks.vit_weights import vit_from_published
from personalization.state import State, from_safetensors, to_safetensors
from training.errors import ConfigurationError
from training.publish import check_names, software
from training.weights.files import READERS, Weights, is_file

_HEADING = "there is no backbone to adapt"
# What published weights of a ViT answer.
_OF_VIT: TaskKind = "classification"


@dataclass(frozen=True)
class FrozenBackbone:
    """A backbone by reference (`name@sha256:…`) in the store at `root`."""

    root: Path | str
    reference: str

    def artefact(self) -> Artefact:
        """Open the artefact without verifying its files; `load` verifies them. Raises ConfigurationError."""
        try:
            return Store(self.root).open(self.reference, verify=False)
        except LocumStoreError as error:
            raise ConfigurationError("the backbone cannot be opened", [f"backbone: {error}"]) from error

    @property
    def manifest(self) -> ModelManifest:
        """The manifest of the backbone."""
        return self.artefact().expect(ModelManifest).manifest

    def load(self, device: torch.device) -> Backbone:
        """Load the network with its weights, in evaluation mode and frozen.

        The network is cached per process and must not be changed.
        """
        return _load(self, device)


@lru_cache(maxsize=2)
def _load(frozen: FrozenBackbone, device: torch.device) -> Backbone:
    artefact, spec = frozen.artefact(), frozen.manifest.network
    network = build_backbone(spec.name, **spec.arguments)
    network.load_state_dict(from_safetensors(artefact.read(WEIGHTS)))
    return network.to(device).eval().requires_grad_(False)


def find_backbone(store: Store, asked: str | None, task: Task, name: str) -> FrozenBackbone:
    """Find the backbone for a task.

    Args:
        asked: `name[@version]` of a model, or of a routing space, which stands for its global model; a file
            with a ViT's published weights (`training.weights.files`), first published as a part of `name`; or
            None, for the store's newest global model of the same task.

    Raises ConfigurationError, which lists the candidates and why they do not fit.
    """
    if asked is None:
        artefact = _newest(store, task)
    elif is_file(asked):
        artefact = publish_weights(store, Path(asked), task, name)
    else:
        artefact = _global_of(store, asked)
        problems = _problems(artefact, task)
        if problems:
            raise ConfigurationError(f"'{artefact}' cannot be the backbone", problems)
    root = store.root.resolve() if isinstance(store.root, Path) else store.root
    return FrozenBackbone(root, f"{artefact.name}@{artefact.digest}")


def publish_weights(store: Store, path: Path, task: Task, name: str) -> Artefact:
    """Publish the downloaded weights of a ViT as the part `NAME.backbone`.

    Raises ConfigurationError naming the file or the part.
    """
    check_names(name, ("backbone",))
    if task.kind != _OF_VIT:
        raise ConfigurationError(
            f"{path} cannot be the backbone", [f"a ViT is for {_OF_VIT}, '{task.name}' is a {task.kind}"]
        )
    try:
        weights = Weights.read(path)
        arguments, state = vit_from_published(
            weights.tensors, task.in_channels, len(task.classes), task.size, str(path)
        )
        spec = NetworkSpec(name="vit", arguments=arguments)
        return publish_backbone(store, name, task, spec, state, weights.source)
    except (OSError, ConfigurationError, NetworkError) as error:
        raise ConfigurationError(f"{path} cannot be the backbone", [str(error)]) from error


def publish_backbone(
    store: Store,
    name: str,
    task: Task,
    spec: NetworkSpec,
    state: State,
    source: ImportedWeights | None = None,
) -> Artefact:
    """Publish weights that were trained elsewhere, in `source`, as the part `NAME.backbone`."""
    network = build_backbone(spec.name, **spec.arguments)
    network.load_state_dict(state)
    manifest = ModelManifest(
        name=f"{name}.backbone",
        part_of=name,
        role="backbone",
        task=task,
        network=spec,
        lineage=Lineage(method="imported", run="", sites=(), rounds=0, seed=0, weights=source),
        software=software(),
    )
    files = {WEIGHTS: to_safetensors(state), GRAPH: to_onnx(network, task.in_channels, task.size)}
    return store.publish(manifest, files)


def has_head_for(manifest: ModelManifest, task: Task) -> bool:
    """Whether the backbone's head was trained for this task, so that the pool's heads can start from it."""
    known = manifest.task
    same = (known.labels, known.class_names) == (task.labels, task.class_names)
    return manifest.role != "backbone" and same


def _newest(store: Store, task: Task) -> Artefact:
    """Find the newest global model of this task that can be the backbone."""
    known: list[Artefact] = []
    for name in store.versions.names():
        try:
            known.append(store.open(name, verify=False))
        except StoreError:
            continue
    trained = [a for a in known if isinstance(a.manifest, ModelManifest) and a.manifest.role == "global"]
    refused = {str(a): _problems(a, task, same_task=True) for a in trained}
    fitting = [a for a in trained if not refused[str(a)]]
    if fitting:
        return max(fitting, key=lambda artefact: (artefact.published, artefact.name))
    advice = (
        "give the published weights of a ViT: --backbone FILE.safetensors"
        if task.kind == _OF_VIT
        else "train one: --method fedavg, with the same --data and --out"
    )
    raise ConfigurationError(
        _HEADING,
        [
            f"{store.root} has no global model to adapt of the task '{task.name}'; {advice}",
            *(f"{label}: {'; '.join(problems)}" for label, problems in refused.items()),
        ],
    )


def _global_of(store: Store, reference: str) -> Artefact:
    try:
        artefact = store.open(reference, verify=False)
        if isinstance(artefact.manifest, RoutingSpaceManifest):
            artefact = store.by_digest(artefact.manifest.global_model)
    except LocumStoreError as error:
        files = f"; a file of weights ends in {', '.join(READERS)}"
        raise ConfigurationError(_HEADING, [f"{error}{files}"]) from error
    return artefact


def _problems(artefact: Artefact, task: Task, *, same_task: bool = False) -> list[str]:
    """List the reasons why a model cannot be the backbone for a task."""
    manifest = artefact.manifest
    if not isinstance(manifest, ModelManifest):
        return [f"expected a model, found a {manifest.kind}"]
    arguments = manifest.network.arguments
    network = outline(manifest.network.name, **arguments)
    if not isinstance(network, Backbone):
        return [f"expected a network that can be scaled and shifted, found a {manifest.network.name}"]
    if network.traits.task != task.kind:
        return [f"expected a network for a {task.kind}, found a {manifest.network.name}"]
    problems = []
    if arguments["in_channels"] != task.in_channels:
        problems.append(
            f"expected {task.in_channels} input channels as the task has, found {arguments['in_channels']}"
        )
    if network.traits.sides not in (None, task.size):
        problems.append(f"expected the task's size {list(task.size)}, found {list(manifest.task.size)}")
    if same_task and not has_head_for(manifest, task):
        problems.append(f"it was trained on another task, '{manifest.task.name}'")
    return problems
