"""Small backbones with random tensors, for tests of FedIns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.store import Store
from model_store.task import Task
from personalization.export import to_onnx
from personalization.networks import build, initialise
from personalization.state import to_safetensors

LINEAGE = Lineage(method="fedavg", run="r", sites=("s",), rounds=1, seed=0)
PICTURES = Task(name="pictures", kind="classification", class_names=("a", "b", "c"), size=(16, 16))


def unet(task: Task, **arguments: Any) -> NetworkSpec:
    content = {"in_channels": task.in_channels, "classes": len(task.classes), "width": 2, **arguments}
    return NetworkSpec(name="unet", arguments=content)


def vit(task: Task, **arguments: Any) -> NetworkSpec:
    content = {
        "in_channels": task.in_channels,
        "classes": len(task.classes),
        "size": list(task.size),
        "patch": 8,
        "width": 16,
        "depth": 2,
        "heads": 2,
        **arguments,
    }
    return NetworkSpec(name="vit", arguments=content)


def publish(root: Path, task: Task, spec: NetworkSpec, name: str = "base", **fields: Any) -> Artefact:
    """A model with every float drawn, batch norm included, that distinguishes images."""
    draw = torch.Generator().manual_seed(7)
    network = initialise(build(spec.name, **spec.arguments), draw)
    with torch.no_grad():
        for path, parameter in network.named_parameters():
            if parameter.ndim == 1:
                spread = 0.2 * torch.randn(parameter.shape, generator=draw)
                parameter.copy_(spread if path.endswith("bias") else 1 + spread)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        network.train()(torch.randn(16, task.in_channels, *task.size, generator=draw))
    network.eval()
    manifest = ModelManifest(name=name, task=task, network=spec, lineage=LINEAGE, **fields)
    files = {
        WEIGHTS: to_safetensors(network.state_dict()),
        GRAPH: to_onnx(network, task.in_channels, task.size),
    }
    return Store(root).publish(manifest, files)
