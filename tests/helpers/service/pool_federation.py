"""Pools that were not trained: what is served of them is arithmetic, which a pool's numbers do not change."""

from __future__ import annotations

from pathlib import Path

from model_store.manifest import GRAPH, WEIGHTS, NetworkSpec, SsfPoolManifest
from model_store.store import Store
from model_store.task import Task

ENTRIES, TOP = 5, 2
USAGE = (10, 30, 0, 40, 20)


def publish_pool(root: Path, task: Task, spec: NetworkSpec, name: str = "pool") -> None:
    """Publish `NAME.backbone` and the ssf-pool `NAME`, of a network with every float drawn at random."""
    import torch

    from personalization.export import to_onnx
    from personalization.fedins import InstanceAdaptive
    from personalization.networks import build_backbone
    from personalization.state import from_safetensors, to_safetensors
    from tests.helpers.training.backbones import LINEAGE, publish

    base = publish(root, task, spec, f"{name}.backbone", part_of=name, role="backbone")
    draw = torch.Generator().manual_seed(3)
    backbone = build_backbone(spec.name, **spec.arguments)
    backbone.load_state_dict(from_safetensors(base.read(WEIGHTS)))
    network = InstanceAdaptive(backbone, len(task.classes), ENTRIES, TOP)
    network.pool.draw(draw)
    with torch.no_grad():
        for parameter in network.pool.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
        noise = torch.randn(16, task.in_channels, *task.size, generator=draw)
        network.pool.centre.copy_(network.query(noise).mean(0))
    manifest = SsfPoolManifest(
        name=name,
        task=task,
        network=spec,
        lineage=LINEAGE,
        backbone=base.digest,
        entries=ENTRIES,
        top=TOP,
        usage=USAGE,
    )
    weights = to_safetensors(network.pool.state_dict())
    Store(root).publish(manifest, {WEIGHTS: weights, GRAPH: to_onnx(network, task.in_channels, task.size)})
