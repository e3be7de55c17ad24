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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from benchmarks.cost.methods.cost import Cost, Result, compared, of_sides
from benchmarks.harness.cells import Cell
from benchmarks.harness.gpu import CPU, awaited, device_of
from benchmarks.harness.measuring import high_water, in_new_process
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
# Width, side, repetitions of a step, and K of each peak of memory.
SIZES = {
    "smoke": (2, 32, 2, (1, 2)),
    "cpu": (16, 96, 30, (1, 2, 4, 8, 16)),
    "gpu": (32, 256, 100, (1, 2, 4, 8, 16)),
}
ROUTED = (("paper", "direct"), ("official", "direct"), ("paper", "pooled"))


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


def _step(cell: Cell) -> Result:
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

    return compared(awaited(training, device), awaited(adaptation, device), cell["repeats"])


def _graph(cell: Cell) -> Result:
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

    return compared(asked(sessions[1]), asked(sessions[0]), cell["repeats"])


def _memory(cell: Cell) -> Result:
    """The size of K + 1 models, and the peak of a process that loads them, adapts and merges."""
    # Freed pages return to the system at once, for every K alike.
    os.environ["MALLOC_ARENA_MAX"] = "1"
    peak = in_new_process(peak_bytes, dict(cell))
    one = sum(value.numel() * value.element_size() for value in states_of(_spec(cell), 1)[0].values())
    return {"peak_bytes": of_sides((cell["K"] + 1) * one, peak)}


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


def cells(size: str) -> Sequence[Cell]:
    """Steps, the graph, and memory by K."""
    width, side, repeats, inside = SIZES[size]
    common = {"size": side, "width": width}
    return [
        *(
            {"what": "step", "preset": preset, "router": router, "K": 3, **common, "repeats": repeats}
            for preset, router in ROUTED
        ),
        {"what": "graph", "K": 3, **common, "repeats": 2 * repeats},
        *({"what": "memory", "K": count, **common} for count in inside),
    ]


def measure(cell: Cell, _work: Path) -> Result:
    """Measure one cell."""
    return {"step": _step, "graph": _graph, "memory": _memory}[cell["what"]](cell)


def case(cell: Cell) -> str:
    """What a line is about."""
    if cell["what"] == "step":
        return f"a step: {cell['preset']}, {cell['router']} router"
    return "the merged graph" if cell["what"] == "graph" else f"K = {cell['K']}: models, and the process"


ADAPTATION = Cost(
    "IOP-FL: a step of adaptation over two plain steps, and the merged network over a plain one",
    cells,
    measure,
    case,
)
