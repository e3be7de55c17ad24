"""Cost of learning w (FedBiCross, Stage 2c): the exact outer step against second-order autograd.

A step is one student's: an inner step of plain SGD on J sources, and the slope of its validation loss in w.
The exact way keeps the sources' gradients and takes inner products with the validation gradient; the other
way keeps the inner step in the graph and differentiates through it. The two alternate, start from equal
weights and must give equal slopes. Memory is the peak of a separate process above its size before the step.

A trajectory of T steps is then run with w learned in S of them: in none, in 6 as in the paper, in all.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.gpu import CPU, awaited, device_of
from benchmarks.harness.measuring import high_water, in_new_process, milliseconds, quartiles
from benchmarks.harness.tables import table
from personalization.fedbicross.bilevel import Gradient, gradient_of, inner_step, outer_gradient
from personalization.fedbicross.distillation import distillation_loss
from personalization.fedbicross.synthesis import SynthesisConfig, Trajectory
from personalization.networks import build, initialise

CLASSES, SIDE, RATE, SHARE = 4, 28, 0.01, 0.5
# The share of the B images for the inner step, as in the paper; the rest is for validation.
TRAIN_SHARE = 0.8
# The first steps allocate memory and warm caches, on both sides.
WARM_UP = 1


@dataclass(frozen=True)
class Profile:
    """Channels (the paper's are 64), B images per cluster (the paper's are 256), steps to time, and T."""

    width: int = 8
    batch: int = 32
    repeats: int = 9
    trajectory: int = 12
    sources: tuple[int, ...] = (2, 4, 8)
    device: str = "cpu"


PROFILES = {
    "smoke": Profile(1, 10, 2, 7, (2,)),
    "cpu": Profile(),
    "gpu": Profile(64, 256, 30, 60, device="cuda"),
}


class BilevelCost(CostExperiment[Profile]):
    """The cost of FedBiCross's outer step."""

    name = "bilevel_cost"
    title = "What learning w costs"
    question = "What does learning w cost, exactly and by second-order autograd?"
    profiles = PROFILES
    by = "what"

    def kinds(self) -> Mapping[str, Kind]:
        """How each kind of cell is measured, and how its rows are shown."""
        return {
            "step": Kind(compute_step, _steps),
            "memory": Kind(compute_memory, _memories),
            "trajectory": Kind(compute_trajectory, _trajectories),
        }

    def measured(self) -> Sequence[Cell]:
        """Time and memory of a step by the number of sources, then trajectories."""
        settings = self.profile
        shared = {"width": settings.width, "batch": settings.batch}
        steps = settings.trajectory
        cells = [
            *({"what": "step", "J": j, "repeats": settings.repeats, **shared} for j in settings.sources),
            *({"what": "memory", "J": j, **shared} for j in settings.sources),
            *({"what": "trajectory", "J": 2, "T": steps, "S": s, **shared} for s in (0, 6, steps)),
        ]
        return cells


class Step:
    """A student, the images and answers of J sources, and its validation images; all drawn from one seed."""

    def __init__(self, width: int, sources: int, batch: int, device: str = CPU) -> None:
        draw = torch.Generator().manual_seed(0)
        network = build("resnet18", in_channels=1, classes=CLASSES, width=width)
        self.student = initialise(network, draw).to(device).train()
        counts = [round(TRAIN_SHARE * batch)] * sources + [batch - round(TRAIN_SHARE * batch)]
        images = [torch.randn(count, 1, SIDE, SIDE, generator=draw) for count in counts]
        answers = [torch.randn(2, count, CLASSES, generator=draw) * 5 for count in counts]
        self.images = [image.to(device) for image in images]
        self.answers = [answer.to(device) for answer in answers]
        self.mixing = torch.full((sources,), 1 / sources, dtype=torch.float64)

    def loss(self, network: Callable[[Tensor], Tensor], index: int) -> Tensor:
        """L_KD on one source's images; the last is for validation."""
        teacher, adapted = self.answers[index]
        return distillation_loss(network(self.images[index]), teacher, adapted, SHARE)

    def exact(self) -> Tensor:
        """The inner step, in place, and dL_val/dw [J] by inner products of gradients."""
        gradients: list[Gradient] = []
        for source in range(len(self.mixing)):
            gradients.append(gradient_of(self.loss(self.student, source), self.student))
        inner_step(self.student, gradients, self.mixing, RATE)
        validation = gradient_of(self.loss(self.student, len(self.mixing)), self.student)
        return outer_gradient(validation, gradients, RATE)

    def second_order(self) -> Tensor:
        """The same by automatic differentiation through the inner step."""
        mixing = self.mixing.float().to(self.images[0].device).requires_grad_()
        parameters = dict(self.student.named_parameters())
        losses = torch.stack([self.loss(self.student, source) for source in range(len(mixing))])
        slopes = torch.autograd.grad(mixing @ losses, [*parameters.values()], create_graph=True)
        moved = {
            name: parameter - RATE * slope
            for (name, parameter), slope in zip(parameters.items(), slopes, strict=True)
        }
        validation = self.loss(lambda images: functional_call(self.student, moved, (images,)), len(mixing))
        (found,) = torch.autograd.grad(validation, mixing)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(moved[name])
        return found.double().cpu()


SIDES: Mapping[str, Callable[[Step], Tensor]] = {"exact": Step.exact, "second order": Step.second_order}


def compute_step(cell: Cell, _work: Path) -> dict[str, Any]:
    """Seconds of both ways, and how far apart their slopes are."""
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    apart = 0.0
    device = device_of(cell)
    first = Step(cell["width"], cell["J"], cell["batch"], device)
    for number in range(WARM_UP + cell["repeats"]):
        slopes = {}
        for name, slope in SIDES.items():
            step = copy.copy(first)
            step.student = copy.deepcopy(first.student)
            began = time.perf_counter()
            slopes[name] = slope(step).cpu()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
        scale = float(slopes["exact"].abs().max())
        apart = max(apart, float((slopes["exact"] - slopes["second order"]).abs().max()) / scale)
    return {
        "seconds": {name: quartiles(values) for name, values in seconds.items()},
        "slopes_apart": apart,
    }


def compute_memory(cell: Cell, _work: Path) -> dict[str, Any]:
    """The peak of memory of both ways, each in a separate process."""
    return {"peak_bytes": {name: in_new_process(peak_bytes, dict(cell), name) for name in SIDES}}


def peak_bytes(cell: Cell, side: str) -> int:
    """This process's peak of memory during one step, above its size before the step; Linux only.

    On a GPU, that of its tensors there.
    """
    torch.set_num_threads(1)
    device = device_of(cell)
    # A small step first: the libraries allocate memory on first use, which is not the step's.
    SIDES[side](Step(1, 2, 8, device))
    step = Step(cell["width"], cell["J"], cell["batch"], device)
    if device != CPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        SIDES[side](step)
        return torch.cuda.max_memory_allocated() - before
    # Resets the peak to the current size.
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    SIDES[side](step)
    return high_water() - before


def compute_trajectory(cell: Cell, _work: Path) -> dict[str, Any]:
    """Seconds of a trajectory with w learned in S of its T steps."""
    draw = torch.Generator().manual_seed(0)

    def network() -> nn.Module:
        made = build("resnet18", in_channels=1, classes=CLASSES, width=cell["width"])
        return initialise(made, draw).to(device_of(cell))

    clusters = cell["J"]
    config = SynthesisConfig(
        steps=cell["T"],
        batch_size=cell["batch"],
        bilevel=cell["S"] > 0,
        outer_steps=max(1, cell["S"]),
    )
    trajectory = Trajectory(
        [[network()] for _ in range(clusters)],
        [network() for _ in range(clusters)],
        torch.full((clusters, clusters), 1 / clusters, dtype=torch.float64),
        (1, SIDE, SIDE),
        CLASSES,
        config,
        seed=0,
    )
    began = time.perf_counter()
    for step in range(1, cell["T"] + 1):
        awaited(partial(trajectory.step, step), device_of(cell))()
    return {"seconds": round(time.perf_counter() - began, 3), "mixing": trajectory.mixing.tolist()}


def _steps(rows: Sequence[Row]) -> list[str]:
    cell = rows[0]["cell"]
    apart = max(row["result"]["slopes_apart"] for row in rows)
    return [
        f"One student's step: ResNet-18, width {cell['width']}, {SIDE}x{SIDE}, {cell['batch']} images a "
        "source, one thread, fp32; milliseconds, median [quartiles]. The slopes in w differ by at most "
        f"{apart:.1e} of the largest.",
        table(["sources J", *SIDES, "ratio"], [_step_line(row) for row in rows]),
    ]


def _memories(rows: Sequence[Row]) -> list[str]:
    return [
        "The same step's peak memory over what is there before it, MiB:",
        table(["sources J", *SIDES, "ratio"], [_memory_line(row) for row in rows]),
    ]


def _trajectories(rows: Sequence[Row]) -> list[str]:
    cell = rows[0]["cell"]
    never = median([row["result"]["seconds"] for row in rows if not row["cell"]["S"]])
    return [
        f"A trajectory: T = {cell['T']} steps, {cell['J']} clusters, {cell['batch']} images each, width "
        f"{cell['width']}. The student learns at every step, w in S of them.",
        table(
            ["S", "seconds", "over S = 0", "largest change of w"],
            [_trajectory_line(row, never) for row in rows],
        ),
    ]


def _step_line(row: Row) -> list[str]:
    times = [row["result"]["seconds"][name] for name in SIDES]
    shown = [milliseconds(t, 0) for t in times]
    return [str(row["cell"]["J"]), *shown, f"{times[1]['median'] / times[0]['median']:.2f}"]


def _memory_line(row: Row) -> list[str]:
    peaks = [row["result"]["peak_bytes"][name] / 2**20 for name in SIDES]
    return [str(row["cell"]["J"]), *(f"{peak:.0f}" for peak in peaks), f"{peaks[1] / peaks[0]:.2f}"]


def _trajectory_line(row: Row, never: float) -> list[str]:
    cell, result = row["cell"], row["result"]
    mixing = torch.tensor(result["mixing"])
    moved = float((mixing - 1 / cell["J"]).abs().max())
    return [str(cell["S"]), f"{result['seconds']:.1f}", f"{result['seconds'] / never:.3f}", f"{moved:.3f}"]
