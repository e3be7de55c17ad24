"""Cost of a step of adaptation over plain training, of an adapted model over a plain one, and of K in memory.

A step of adaptation needs two forward and two backward passes (the images, and the same images with noise).
Its floor is two steps of training the plain network on the same batch. The two alternate in one process;
medians are compared. The merged network's graph is compared with the plain one's in onnxruntime in the same
way. Memory is the peak of a separate process that loads K + 1 models and adapts.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.gpu import CPU, awaited, device_of
from benchmarks.harness.measuring import alternated, high_water, in_new_process, milliseconds, quartiles
from benchmarks.harness.tables import table
from model_store.manifest import NetworkSpec
from personalization.export import INPUT, OUTPUT, to_onnx
from personalization.iop_fl.merge import merge
from personalization.iop_fl.network import parameter_groups, route
from personalization.iop_fl.space import RoutingSpace
from personalization.losses import soft_dice_loss
from personalization.state import State
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import Batch
from personalization.test_time.recipe import adapt, objective_of
from service.inference.providers import wanted_providers
from training.local.networks import network_of, new_network, state_of

BATCH = 16
# The first steps allocate memory and warm caches, on both sides.
WARM_UP = 3


@dataclass(frozen=True)
class Profile:
    """The networks' width, the images' side, how often each side is timed, and K for the peaks of memory."""

    width: int = 16
    size: int = 96
    repeats: int = 30
    inside: tuple[int, ...] = (1, 2, 4, 8, 16)
    device: str = "cpu"


PROFILES = {
    "smoke": Profile(2, 32, 2, (1, 2)),
    "cpu": Profile(),
    "gpu": Profile(32, 256, 100, device="cuda"),
}


class AdaptationCost(CostExperiment[Profile]):
    """The cost of an adaptation step, of an adapted model, and of K in memory."""

    name = "adaptation_cost"
    title = "What adapting costs"
    question = "What does an adaptation step cost over plain training, and an adapted model over a plain one?"
    profiles = PROFILES
    by = "what"

    def kinds(self) -> Mapping[str, Kind]:
        """How each kind of cell is measured, and how its rows are shown."""
        return {
            "step": Kind(_step, _steps),
            "graph": Kind(_graph, _graphs),
            "memory": Kind(_memory, _memories),
        }

    def measured(self) -> Sequence[Cell]:
        """Steps, the graph, and memory by K."""
        repeats = self.profile.repeats
        common = {"size": self.profile.size, "width": self.profile.width}
        routed = [("paper", "direct"), ("official", "direct"), ("paper", "pooled")]
        cells = [
            *(
                {"what": "step", "preset": preset, "router": router, "K": 3, **common, "repeats": repeats}
                for preset, router in routed
            ),
            {"what": "graph", "K": 3, **common, "repeats": 2 * repeats},
            *({"what": "memory", "K": inside, **common} for inside in self.profile.inside),
        ]
        return cells


def states_of(spec: NetworkSpec, count: int) -> list[State]:
    """Random weights: the cost of a step does not depend on them."""
    return [state_of(new_network(spec, torch.Generator().manual_seed(seed))) for seed in range(count)]


def space_of(spec: NetworkSpec, inside: int) -> RoutingSpace:
    """A routing space of `inside` models and the global one."""
    *sites, shared = states_of(spec, inside + 1)
    named = {f"site{number:02d}": state for number, state in enumerate(sites)}
    return RoutingSpace.of(spec.name, spec.arguments, named, shared)


def images_of(cell: Cell) -> Tensor:
    """One batch of noise."""
    shape = (BATCH, 1, cell["size"], cell["size"])
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _step(cell: Cell, _work: Path) -> dict[str, Any]:
    """Time a step of `adapt` and two steps of training."""
    device = device_of(cell)
    spec, images = _spec(cell), images_of(cell).to(device)
    config = AdaptationConfig(preset=cell["preset"], router=cell["router"])
    objective = objective_of(config.preset)
    routed = route(space_of(spec, cell["K"]), config.router).to(device).train()
    groups = parameter_groups(routed)
    optimiser = torch.optim.Adam(
        [
            {"params": groups["routing"], "lr": config.rate},
            {"params": groups["bn"], "lr": config.bn_rate},
        ]
    )
    plain = network_of(spec, states_of(spec, 1)[0], torch.device(device)).train()
    plain_optimiser = torch.optim.Adam(plain.parameters(), lr=1e-3)
    targets = (images[:, 0] > 1).to(torch.uint8)
    counter = iter(range(sys.maxsize))

    def adaptation() -> None:
        objective.step(
            routed, Batch(images, torch.arange(len(images), device=device)), config, optimiser, next(counter)
        )

    def training() -> None:
        for _ in range(2):
            plain_optimiser.zero_grad(set_to_none=True)
            loss = soft_dice_loss(plain(images), targets)
            torch.autograd.backward(loss)
            plain_optimiser.step()
            loss.item()

    return _compared(awaited(adaptation, device), awaited(training, device), cell["repeats"])


def _graph(cell: Cell, _work: Path) -> dict[str, Any]:
    """Time the merged network's graph and a plain network's graph."""
    spec, images = _spec(cell), images_of(cell)
    space = space_of(spec, cell["K"])
    merged = merge(space, route(space), images)
    size = (cell["size"], cell["size"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    sessions = [
        onnxruntime.InferenceSession(to_onnx(network, 1, size), options, wanted_providers(device_of(cell)))
        for network in (merged, space.plain())
    ]
    feed = {INPUT: np.ascontiguousarray(images.numpy())}

    def asked(session: Any) -> Callable[[], None]:
        return lambda: session.run([OUTPUT], feed)

    return _compared(asked(sessions[0]), asked(sessions[1]), cell["repeats"])


def _compared(ours: Callable[[], object], floor: Callable[[], object], repeats: int) -> dict[str, Any]:
    kept = alternated({"ours": ours, "floor": floor}, repeats, WARM_UP)
    return {
        **{f"{name}_s": quartiles(values) for name, values in kept.items()},
        "ratio": round(median(kept["ours"]) / median(kept["floor"]), 4),
    }


def _memory(cell: Cell, _work: Path) -> dict[str, Any]:
    """The peak of a child process, and the size of K + 1 models."""
    # Freed pages return to the system at once, for every K alike.
    os.environ["MALLOC_ARENA_MAX"] = "1"
    peak = in_new_process(peak_bytes, dict(cell))
    one = sum(value.numel() * value.element_size() for value in states_of(_spec(cell), 1)[0].values())
    return {"peak_bytes": peak, "models_bytes": (cell["K"] + 1) * one}


def peak_bytes(cell: Cell) -> int:
    """Load K + 1 models, adapt for one epoch, merge. Returns the peak of this process's resident memory, or
    of its tensors on the GPU."""
    torch.set_num_threads(1)
    device = device_of(cell)
    space = space_of(_spec(cell), cell["K"])
    network: nn.Module = route(space).to(device)
    images = images_of(cell).to(device)
    adapt(network, images, AdaptationConfig(epochs=1, batch_size=BATCH))
    merge(space, network, images)
    if device != CPU:
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":
        # Not ru_maxrss: on Linux it starts at the parent's size at the fork.
        return high_water()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _spec(cell: Cell) -> NetworkSpec:
    return NetworkSpec(name="unet", arguments={"in_channels": 1, "classes": 2, "width": cell["width"]})


def _steps(rows: Sequence[Row]) -> list[str]:
    cell = rows[0]["cell"]
    body = [[f"{row['cell']['preset']}, {row['cell']['router']}", *_times(row["result"])] for row in rows]
    return [
        f"U-Net of width {cell['width']}, one batch of {BATCH} at {cell['size']}x{cell['size']}, one "
        "thread. Milliseconds: median [quartiles]; both sides alternate in one process.",
        "A step of adaptation over three inside models and the global one, and two steps of training the "
        "plain network:",
        table(["loss, router", "adaptation", "two plain steps", "ratio"], body),
    ]


def _graphs(rows: Sequence[Row]) -> list[str]:
    return [
        "The merged network's graph in onnxruntime, and that of the federation's global model:",
        table(["graph", "merged", "plain", "ratio"], [["merged", *_times(row["result"])] for row in rows]),
    ]


def _memories(rows: Sequence[Row]) -> list[str]:
    models = [float(row["result"]["models_bytes"]) / 2**20 for row in rows]
    peaks = [float(row["result"]["peak_bytes"]) / 2**20 for row in rows]
    body = [
        [row["cell"]["K"], f"{own:.0f}", f"{peak:.0f}"]
        for row, own, peak in zip(rows, models, peaks, strict=True)
    ]
    parts = [
        "Peak memory of a process that loads K inside models and the global one, adapts and merges, MiB:",
        table(["K", "the models", "peak"], body),
    ]
    if len(rows) > 1:
        slope = float(np.polyfit(models, peaks, 1)[0])
        parts.append(f"Each MiB of models adds {slope:.2f} MiB to the peak (least squares).")
    return parts


def _times(result: Mapping[str, Any]) -> list[str]:
    sides = (result["ours_s"], result["floor_s"])
    times = [milliseconds(s) for s in sides]
    return [*times, f"{result['ratio']:.3f}"]
