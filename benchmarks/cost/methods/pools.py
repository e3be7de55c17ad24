"""Cost of adapting to each scan by a pool (FedIns) over one plain forward pass of the same backbone.

Both sides run in the service's own sessions, on one thread; they alternate, run by run, and medians are
compared. The floor is arithmetic: the query's pass and the adapted pass, counted operator by operator. Two
more steps give the cost of a volume that is routed once: its slices' queries, and the pass with a given
query.

Peak memory is that of a separate process, which loads one graph and runs it. Traffic is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cost.methods.cost import PLAIN, Cost, Result, compared, of_sides
from benchmarks.cost.peak_memory import peak_mb
from benchmarks.harness.cells import Cell
from benchmarks.harness.gpu import device_of
from personalization.export import to_onnx
from personalization.fedins import InstanceAdaptive
from personalization.networks import Backbone, build_backbone, initialise
from service.inference.sessions import GraphSession


def _unet(width: int, size: int) -> dict[str, Any]:
    return {"name": "unet", "size": size, "arguments": {"in_channels": 1, "classes": 2, "width": width}}


def _vit(width: int, depth: int, size: int, patch: int = 16) -> dict[str, Any]:
    arguments = {"in_channels": 3, "classes": 10, "width": width, "depth": depth}
    return {"name": "vit", "size": size, "arguments": {**arguments, "size": [size, size], "patch": patch}}


_BACKBONES = {
    "U-Net 16": _unet(16, 128),
    "U-Net 32": _unet(32, 256),
    "ViT-S/16": _vit(384, 12, 224),
    "ViT-B/16": _vit(768, 12, 224),
}
# Backbones by their name in the table, how often each is run, and batches.
SIZES: Mapping[str, tuple[Mapping[str, Mapping[str, Any]], int, tuple[int, ...]]] = {
    "smoke": ({"U-Net 2": _unet(2, 32), "ViT 16": _vit(16, 2, 16, 8)}, 2, (2,)),
    "cpu": (_BACKBONES, 15, (1, 8)),
    "gpu": (_BACKBONES, 50, (1, 8, 32)),
}


def adaptive(backbone: Mapping[str, Any], entries: int, top: int) -> InstanceAdaptive:
    """A backbone with random weights and a random pool."""
    generator = torch.Generator().manual_seed(0)
    network = build_backbone(backbone["name"], **backbone["arguments"])
    initialise(network, generator)
    found = InstanceAdaptive(network, backbone["arguments"]["classes"], entries, top)
    found.pool.draw(generator)
    return found


def multiply_adds(network: Backbone, size: int) -> tuple[int, int]:
    """Multiply-adds of one image's query pass and plain pass: convolutions and matrix products."""
    image = torch.zeros(1, network.in_channels, size, size)
    counts = []
    for call in (network.query, network):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call(image)
        counts.append(int(counter.get_total_flops()) // 2)
    return counts[0], counts[1]


def compute(cell: Cell, work: Path) -> Result:
    """Measure one cell."""
    backbone, size = cell["backbone"], cell["backbone"]["size"]
    network = adaptive(backbone, cell["entries"], cell["top"])
    channels = network.backbone.in_channels
    graphs = {
        name: to_onnx(served, channels, (size, size))
        for name, served in (("plain", network.backbone), ("pool", network))
    }
    images = np.random.default_rng(0).normal(size=(cell["batch"], channels, size, size)).astype(np.float32)
    plain, pool = (
        GraphSession(name, graph, threads=1, device=device_of(cell)) for name, graph in graphs.items()
    )
    query = pool.queries(images).mean(0, keepdims=True)
    found = compared(
        lambda: plain.run(images),
        lambda: pool.run(images),
        cell["repeats"],
        query=lambda: pool.queries(images),
        given=lambda: pool.run_alone(images, query),
    )
    middle = {name: each["median"] for name, each in found["seconds"].items()}
    asked, passed = multiply_adds(network.backbone, size)
    floats = [t.numel() for t in network.backbone.state_dict().values() if t.is_floating_point()]
    work.mkdir(parents=True, exist_ok=True)
    for name, graph in graphs.items():
        (work / name).write_bytes(graph)
    peaks = {name: round(1e6 * peak_mb(work / name, images.shape)) for name in graphs}
    return {
        **found,
        "volume_ratio": round((middle["query"] + middle["given"]) / middle[PLAIN], 4),
        "floor": round((asked + passed) / passed, 4),
        "exchanged": sum(parameter.numel() for parameter in network.pool.parameters()),
        "full": sum(floats),
        "graph_bytes": {name: len(graph) for name, graph in graphs.items()},
        "peak_bytes": of_sides(peaks["plain"], peaks["pool"]),
    }


def cells(size: str) -> Sequence[Cell]:
    """Every backbone at every batch."""
    backbones, repeats, batches = SIZES[size]
    return [
        {
            "label": label,
            "backbone": backbone,
            "batch": batch,
            "entries": 25,
            "top": 3,
            "repeats": repeats,
        }
        for label, backbone in backbones.items()
        for batch in batches
    ]


def case(cell: Cell) -> str:
    """What a line is about."""
    return f"{cell['label']}, batch {cell['batch']}"


def _also(result: Result) -> str:
    share = f"{100 * result['exchanged'] / result['full']:.1f} %"
    return f"a volume once: {result['volume_ratio']:.2f}; sends {share} of the weights"


POOLS = Cost("FedIns: every image by a pool of 25 over one plain pass", cells, compute, case, _also)
