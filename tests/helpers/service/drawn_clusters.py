"""`shapes`: two clusters of a drawn network, with batch norms that expect what two hospitals see."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, WEIGHTS, ClustersManifest, Lineage, ModelManifest, NetworkSpec
from model_store.preprocessing import prepare
from model_store.scan import Scan
from model_store.store import Store
from personalization.export import to_onnx
from personalization.networks import build
from personalization.state import to_safetensors
from service.worker.runner import run_job
from tests.helpers.service.network_input import file_of
from training.phantom.shapes import HOSPITALS, Camera, make_shape
from training.phantom.shapes import TASK as SHAPES

TASK = SHAPES.model_copy(update={"size": (16, 16)})
NETWORK = NetworkSpec(name="resnet18", arguments={"in_channels": 1, "classes": 3, "width": 2})
LINEAGE = Lineage(method="fedbicross", run="test", sites=("elm", "hazel"), rounds=1, seed=0)
# What the two clusters' hospitals see: shapes, and little but noise.
CAMERAS = {"elm": HOSPITALS["elm"].camera, "hazel": Camera(contrast=15, level=120, noise=35)}
CLUSTERS = {"1": "elm", "2": "hazel"}


def pictures(site: str, count: int, seed: int = 0) -> list[NDArray[np.uint8]]:
    return [make_shape(CAMERAS[site], i % 3, 16, 1000 * seed + i) for i in range(count)]


def as_png(pixels: NDArray[np.uint8]) -> bytes:
    return file_of(pixels, "PNG")


def publish(store: Store, sharpness: float = 0.0) -> Artefact:
    """What was never trained says the same of everything. With a `sharpness` its answers are decided and
    various: the logits are centred on what the cluster's hospital sends, and have this standard deviation.
    """
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network: Any = build(NETWORK.name, **NETWORK.arguments)
    clusters = {}
    for name, site in CLUSTERS.items():
        slices = [
            prepare(Scan(pixels[..., None], None, "png"), TASK).slices for pixels in pictures(site, 60, 1)
        ]
        images = torch.from_numpy(np.concatenate(slices))
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        network.train()
        network(images)
        network.eval()
        if sharpness:
            with torch.no_grad():
                logits = network(images)
                rates = sharpness / logits.std(dim=0)
                network.linear.weight.mul_(rates[:, None])
                network.linear.bias.copy_(rates * (network.linear.bias - logits.mean(dim=0)))
        manifest = ModelManifest(
            name=f"shapes.cluster-{name}",
            part_of="shapes",
            role="cluster",
            task=TASK,
            network=NETWORK,
            lineage=LINEAGE,
        )
        files = {WEIGHTS: to_safetensors(network.state_dict()), GRAPH: to_onnx(network, 1, TASK.size)}
        clusters[name] = store.publish(manifest, files).digest
    manifest = ClustersManifest(
        name="shapes",
        task=TASK,
        lineage=LINEAGE,
        clusters=clusters,
        assignment={site: name for name, site in CLUSTERS.items()},
        mixing={name: dict.fromkeys(clusters, 0.5) for name in clusters},
    )
    return store.publish(manifest, {})


def submit(api: Any, scans: list[NDArray[np.uint8]], options: str = "{}") -> str:
    """The job, which no worker has seen: there is no Redis."""
    accepted = api.client.post(
        "/hospitals/oak/adaptations",
        files=[("scans", ("a", as_png(pixels))) for pixels in scans],
        data={"model": "shapes", "options": options},
    )
    assert accepted.status_code == 202, accepted.text
    location: str = accepted.headers["Location"]
    return location.rsplit("/", 1)[1]


def finished(api: Any, job: str) -> dict[str, Any]:
    run_job(job, api.settings)
    found: dict[str, Any] = api.client.get(f"/jobs/{job}").json()
    return found
