"""Cost of adapting to each scan by a pool (FedIns) over one plain forward pass of the same backbone.

Both sides run in the service's own sessions, on one thread; they alternate, run by run, and medians are
compared. The floor is arithmetic: the query's pass and the adapted pass, counted operator by operator. Two
more steps give the cost of a volume that is routed once: its slices' queries, and the pass with a given
query.

Peak memory is that of a separate process, which loads one graph and runs it. Traffic is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.cost.peak_memory import peak_mb
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.gpu import device_of
from benchmarks.harness.measuring import alternated, milliseconds, quartiles
from benchmarks.harness.tables import table
from personalization.export import to_onnx
from personalization.fedins import InstanceAdaptive
from personalization.networks import Backbone, build_backbone, initialise
from service.inference.sessions import GraphSession

# A ViT's floor is nearly two passes; a U-Net's is its encoder and a whole pass.
TARGETS = {"vit": 2.0, "unet": 1.6}
# The first runs allocate memory and warm caches, on both sides.
WARM_UP = 3


@dataclass(frozen=True)
class Profile:
    """Backbones by their name in the table, and how often each is run."""

    backbones: Mapping[str, Mapping[str, Any]]
    repeats: int
    batches: tuple[int, ...] = (1, 8)
    device: str = "cpu"


def _unet(width: int, size: int) -> dict[str, Any]:
    return {"name": "unet", "size": size, "arguments": {"in_channels": 1, "classes": 2, "width": width}}


def _vit(width: int, depth: int, size: int, patch: int = 16) -> dict[str, Any]:
    arguments = {"in_channels": 3, "classes": 10, "width": width, "depth": depth}
    return {"name": "vit", "size": size, "arguments": {**arguments, "size": [size, size], "patch": patch}}


PROFILES = {
    "smoke": Profile({"U-Net 2": _unet(2, 32), "ViT 16": _vit(16, 2, 16, 8)}, 2, (2,)),
    "cpu": Profile(
        {
            "U-Net 16": _unet(16, 128),
            "U-Net 32": _unet(32, 256),
            "ViT-S/16": _vit(384, 12, 224),
            "ViT-B/16": _vit(768, 12, 224),
        },
        15,
    ),
}
PROFILES["full"] = Profile(PROFILES["cpu"].backbones, 50)
PROFILES["gpu"] = Profile(PROFILES["cpu"].backbones, 50, (1, 8, 32), "cuda")


class SsfCost(CostExperiment[Profile]):
    """The cost of a pool of SSF entries beside the plain backbone."""

    name = "ssf_cost"
    title = "What a pool costs"
    question = "What does picking from a pool cost over one plain pass?"
    profiles = PROFILES

    def kinds(self) -> Mapping[str, Kind]:
        """One kind."""
        return {"": Kind(compute, sections)}

    def measured(self) -> Sequence[Cell]:
        """Every backbone at every batch."""
        return cells_of(self.profile)


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


def compute(cell: Cell, work: Path) -> dict[str, Any]:
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
    steps: dict[str, Callable[[], Any]] = {
        "plain": lambda: plain.run(images),
        "pool": lambda: pool.run(images),
        "query": lambda: pool.queries(images),
        "given": lambda: pool.run_alone(images, query),
    }
    kept = alternated(steps, cell["repeats"], WARM_UP)
    asked, passed = multiply_adds(network.backbone, size)
    floats = [t.numel() for t in network.backbone.state_dict().values() if t.is_floating_point()]
    work.mkdir(parents=True, exist_ok=True)
    for name, graph in graphs.items():
        (work / name).write_bytes(graph)
    memory = {name: peak_mb(work / name, images.shape) for name in graphs}
    return {
        **{f"{name}_s": quartiles(values) for name, values in kept.items()},
        "ratio": round(median(kept["pool"]) / median(kept["plain"]), 4),
        "volume_ratio": round((median(kept["query"]) + median(kept["given"])) / median(kept["plain"]), 4),
        "floor": round((asked + passed) / passed, 4),
        "exchanged": sum(parameter.numel() for parameter in network.pool.parameters()),
        "full": sum(floats),
        "graph_bytes": {name: len(graph) for name, graph in graphs.items()},
        "peak_mb": memory,
    }


def cells_of(settings: Profile, entries: int = 25, top: int = 3) -> list[Cell]:
    """Every backbone at every batch."""
    return [
        {
            "label": label,
            "backbone": backbone,
            "batch": batch,
            "entries": entries,
            "top": top,
            "repeats": settings.repeats,
        }
        for label, backbone in settings.backbones.items()
        for batch in settings.batches
    ]


def sections(rows: Sequence[Row]) -> list[str]:
    """The page: time, what travels, memory."""
    time_header = ["backbone", "batch", "plain, ms", "pool, ms", "ratio", "target", "floor", "volume, once"]
    memory_header = ["backbone", "batch", "graph, MB", "of the plain one", "peak, MB", "of the plain one"]
    traffic_header = ["backbone", "a pool of", "numbers sent", "all weights", "share"]
    singles = list({row["cell"]["label"]: row for row in rows}.values())
    return [
        "One thread, onnxruntime. Median [quartiles] of a run of the whole batch. `ratio` is FedIns, with "
        "every image adapted by itself, to one plain pass; `floor` the same in multiply-adds, in which "
        "scaling, shifting and looking up count nothing. `volume, once` is the ratio for the slices of a "
        "volume that is routed as a whole: all queries first, then every slice with the mean query given.",
        table(time_header, [_time(row) for row in rows]),
        "What a site sends in a round, in numbers (float32), against all of the backbone's weights.",
        table(traffic_header, [_traffic(row) for row in singles]),
        "The graph as a file, and what loading and running it adds to a process's peak of resident memory.",
        table(memory_header, [_memory(row) for row in rows]),
    ]


def _time(row: Row) -> list[str]:
    cell, result = row["cell"], row["result"]
    target = TARGETS[cell["backbone"]["name"]]
    return [
        cell["label"],
        str(cell["batch"]),
        *(milliseconds(s) for s in (result["plain_s"], result["pool_s"])),
        f"{result['ratio']:.2f}",
        f"{target:.1f} {'met' if result['ratio'] <= target else 'missed'}",
        f"{result['floor']:.2f}",
        f"{result['volume_ratio']:.2f}",
    ]


def _traffic(row: Row) -> list[str]:
    result = row["result"]
    share = f"{100 * result['exchanged'] / result['full']:.1f} %"
    entries = str(row["cell"]["entries"])
    return [row["cell"]["label"], entries, f"{result['exchanged']:,}", f"{result['full']:,}", share]


def _memory(row: Row) -> list[str]:
    cell, size, peak = row["cell"], row["result"]["graph_bytes"], row["result"]["peak_mb"]
    return [
        cell["label"],
        str(cell["batch"]),
        f"{size['pool'] / 1e6:.1f}",
        f"{size['pool'] / size['plain']:.2f}",
        f"{peak['pool']:.0f}",
        f"{peak['pool'] / max(peak['plain'], 0.1):.2f}",
    ]
