"""Cost of a step of adaptation over plain training, of an adapted model over a plain one, and of K in memory.

A step of adaptation needs two forward and two backward passes (the images, and the same images with noise).
Its floor is two steps of training the plain network on the same batch. The two alternate in one process;
medians are compared. The merged network's graph is compared with the plain one's in onnxruntime in the same
way. Memory is the peak of a separate process that loads K + 1 models and adapts.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, Table
from benchmarks.harness.gpu import CPU, awaited, device_of, on_device
from benchmarks.harness.measuring import high_water, milliseconds, quartiles
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
from service.inference.sessions import wanted_providers
from training.methods.common.local_training import network_of, new_network, state_of

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


class AdaptationCost(Experiment[Profile]):
    """The cost of an adaptation step, of an adapted model, and of K in memory."""

    name = "adaptation_cost"
    title = "What adapting costs"
    question = "What does an adaptation step cost over plain training, and an adapted model over a plain one?"
    profiles = PROFILES
    tables = (Table("adaptation_cost"),)

    def cells(self) -> list[Cell]:
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
        return on_device(cells, self.profile.device)

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """Measure one cell."""
        # For the child process of a memory cell: freed pages return to the system at once, for every K alike.
        os.environ["MALLOC_ARENA_MAX"] = "1"
        return compute(cell, work)

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """Time of a step and of the graph, and memory."""
        return sections(rows, self.profile)


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


def compute(cell: Cell, _work: Path) -> dict[str, Any]:
    """Measure one cell."""
    return {"step": _step, "graph": _graph, "memory": _memory}[cell["what"]](cell)


def _step(cell: Cell) -> dict[str, Any]:
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

    return _alternated(awaited(adaptation, device), awaited(training, device), cell["repeats"])


def _graph(cell: Cell) -> dict[str, Any]:
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

    return _alternated(asked(sessions[0]), asked(sessions[1]), cell["repeats"])


def _alternated(ours: Callable[[], object], floor: Callable[[], object], repeats: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"ours": [], "floor": []}
    for repeat in range(WARM_UP + repeats):
        # Which side goes first alternates too, so that the state it leaves favours neither.
        sides = [("ours", ours), ("floor", floor)]
        for name, side in sides if repeat % 2 else sides[::-1]:
            began = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - began)
    kept = {name: values[WARM_UP:] for name, values in seconds.items()}
    return {
        "ours_s": quartiles(kept["ours"]),
        "floor_s": quartiles(kept["floor"]),
        "ratio": round(median(kept["ours"]) / median(kept["floor"]), 4),
    }


def _memory(cell: Cell) -> dict[str, Any]:
    """The peak of a child process, and the size of K + 1 models."""
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1) as pool:
        peak = pool.apply(peak_bytes, (dict(cell),))
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


def sections(found: Sequence[Row], settings: Profile) -> list[str]:
    """The page's tables."""
    by_kind: dict[str, list[Row]] = {"step": [], "graph": [], "memory": []}
    for row in found:
        by_kind[row["cell"]["what"]].append(row)
    steps = [
        [f"{row['cell']['preset']}, {row['cell']['router']}", *_times(row["result"])]
        for row in by_kind["step"]
    ]
    graphs = [["merged", *_times(row["result"])] for row in by_kind["graph"]]
    memory = [
        [row["cell"]["K"], f"{row['result']['models_bytes'] / 2**20:.0f}", f"{_mib(row):.0f}"]
        for row in by_kind["memory"]
    ]
    parts = [
        f"U-Net of width {settings.width}, one batch of {BATCH} at {settings.size}x{settings.size}, one "
        "thread. Milliseconds: median [quartiles]; both sides alternate in one process.",
        "A step of adaptation over three inside models and the global one, and two steps of training the "
        "plain network:",
        table(["loss, router", "adaptation", "two plain steps", "ratio"], steps),
        "The merged network's graph in onnxruntime, and that of the federation's global model:",
        table(["graph", "merged", "plain", "ratio"], graphs),
        "Peak memory of a process that loads K inside models and the global one, adapts and merges, MiB:",
        table(["K", "the models", "peak"], memory),
    ]
    if len(by_kind["memory"]) > 1:
        peaks = np.array([_mib(row) for row in by_kind["memory"]])
        models = np.array([row["result"]["models_bytes"] / 2**20 for row in by_kind["memory"]])
        slope = float(np.polyfit(models, peaks, 1)[0])
        parts.append(f"Each MiB of models adds {slope:.2f} MiB to the peak (least squares).")
    return parts


def _mib(row: Row) -> float:
    return float(row["result"]["peak_bytes"]) / 2**20


def _times(result: Mapping[str, Any]) -> list[str]:
    sides = (result["ours_s"], result["floor_s"])
    times = [milliseconds(s) for s in sides]
    return [*times, f"{result['ratio']:.3f}"]
