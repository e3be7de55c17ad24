"""A routing space of random networks, for measurements that do not depend on the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec, RoutingSpaceManifest
from model_store.store import Store
from model_store.task import Task
from personalization.export import to_onnx
from personalization.networks import build
from personalization.state import to_safetensors


def publish_random_space(
    store: Store, name: str, task: Task, width: int, run: str, half_of: Tensor | None = None
) -> None:
    """Publish the space `name`, of two random U-Nets: the global one and that of a site "a".

    Random networks mark everything or nothing. With `half_of` [1, 1, H, W] these mark half of that picture.
    """
    arguments = {"in_channels": 1, "classes": 2, "width": width}
    lineage = Lineage(method="none", run=run, sites=("a",), rounds=0, seed=0)
    digests = {}
    for seed, site in enumerate((None, "a")):
        torch.manual_seed(seed)
        network = build("unet", **arguments)
        if half_of is not None:
            _balance(network, half_of)
        manifest = ModelManifest(
            name=f"{name}.{site or 'global'}",
            part_of=name,
            role="inside" if site else "global",
            site=site,
            task=task,
            network=NetworkSpec(name="unet", arguments=dict(arguments)),
            lineage=lineage,
        )
        files = {WEIGHTS: to_safetensors(network.state_dict()), GRAPH: to_onnx(network, 1, task.size)}
        digests[site] = store.publish(manifest, files).digest
    space = RoutingSpaceManifest(
        name=name, task=task, lineage=lineage, global_model=digests[None], inside={"a": digests["a"]}
    )
    store.publish(space, {})


def _balance(network: nn.Module, picture: Tensor) -> None:
    with torch.no_grad():
        logits = network.eval()(picture)
        network.get_parameter("conv.bias")[1] -= (logits[:, 1] - logits[:, 0]).median()
