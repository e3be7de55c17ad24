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
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.cost.methods.cost import METHOD, PLAIN, Cost, Result, of_sides
from benchmarks.harness.cells import Cell
from benchmarks.harness.gpu import CPU, awaited, device_of
from benchmarks.harness.measuring import high_water, in_new_process, quartiles
from personalization.fedbicross.bilevel import Gradient, gradient_of, inner_step, outer_gradient
from personalization.fedbicross.distillation import distillation_loss
from personalization.fedbicross.synthesis import SynthesisConfig, Trajectory
from personalization.networks import build, initialise

CLASSES, SIDE, RATE, SHARE = 4, 28, 0.01, 0.5
# The share of the B images for the inner step, as in the paper; the rest is for validation.
TRAIN_SHARE = 0.8
# The first steps allocate memory and warm caches, on both sides.
WARM_UP = 1
# Channels (the paper has 64), B images per cluster (the paper has 256), repetitions, T, and J of each step.
SIZES = {
    "smoke": (1, 10, 2, 7, (2,)),
    "cpu": (8, 32, 9, 12, (2, 4, 8)),
    "gpu": (64, 256, 30, 60, (2, 4, 8)),
}


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


SIDES: Mapping[str, Callable[[Step], Tensor]] = {PLAIN: Step.exact, METHOD: Step.second_order}


def _step(cell: Cell) -> Result:
    """Seconds of both ways, how far apart their slopes are, and the peak of memory of each."""
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
        scale = float(slopes[PLAIN].abs().max())
        apart = max(apart, float((slopes[PLAIN] - slopes[METHOD]).abs().max()) / scale)
    return {
        "seconds": {name: quartiles(values) for name, values in seconds.items()},
        "ratio": round(median(seconds[METHOD]) / median(seconds[PLAIN]), 4),
        "slopes_apart": apart,
        "peak_bytes": {name: in_new_process(peak_bytes, dict(cell), name) for name in SIDES},
    }


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


def _trajectory(cell: Cell) -> Result:
    """Seconds of a trajectory without w, and with w learned in S of its T steps."""
    (never, _), (seconds, moved) = (_run(cell, steps) for steps in (0, cell["S"]))
    return {
        "seconds": of_sides(*(dict.fromkeys(("median", "q1", "q3"), each) for each in (never, seconds))),
        "ratio": round(seconds / never, 4),
        "moved": moved,
    }


def _run(cell: Cell, outer_steps: int) -> tuple[float, float]:
    """Seconds of one trajectory, and the largest change of w."""
    draw = torch.Generator().manual_seed(0)

    def network() -> nn.Module:
        made = build("resnet18", in_channels=1, classes=CLASSES, width=cell["width"])
        return initialise(made, draw).to(device_of(cell))

    clusters = cell["J"]
    config = SynthesisConfig(
        steps=cell["T"],
        batch_size=cell["batch"],
        bilevel=outer_steps > 0,
        outer_steps=max(1, outer_steps),
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
    seconds = round(time.perf_counter() - began, 3)
    return seconds, float((trajectory.mixing - 1 / clusters).abs().max())


def cells(size: str) -> Sequence[Cell]:
    """A step by the number of sources, then trajectories with w learned in half and in all of their steps."""
    width, batch, repeats, steps, sources = SIZES[size]
    shared = {"width": width, "batch": batch}
    return [
        *({"what": "step", "J": j, "repeats": repeats, **shared} for j in sources),
        *({"what": "trajectory", "J": 2, "T": steps, "S": s, **shared} for s in (6, steps)),
    ]


def measure(cell: Cell, _work: Path) -> Result:
    """Measure one cell."""
    return {"step": _step, "trajectory": _trajectory}[cell["what"]](cell)


def case(cell: Cell) -> str:
    """What a line is about."""
    if cell["what"] == "step":
        return f"a step by second-order autograd over the exact one, {cell['J']} sources"
    return f"a trajectory, w learned in {cell['S']} of {cell['T']} steps over none"


BILEVEL = Cost("FedBiCross: learning w", cells, measure, case)
