"""Calls to the device of one step: operations, waits of the host, and copies to the device.

They are counted on the pretended device (`benchmarks.harness.pretended_cuda`), so that no GPU is needed, and
they are the same on every machine. An operation is one of aten: about 5 to 10 microseconds of the host in
eager mode, whatever its size, so small networks wait for the host. A wait keeps the host from sending the
next operations until the device has done all before. One step is the difference between three and two.

torch takes the operations of an optimiser for all weights at once on a GPU, and here one by one: their number
is counted too high.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.cost.methods.adaptation import space_of
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.pretended_cuda import PretendedCuda
from benchmarks.harness.tables import table
from model_store.manifest import NetworkSpec
from personalization.cancellation import never_cancelled
from personalization.gate import consensus
from personalization.losses import LOSSES
from personalization.options.presets import PRESETS
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import Batch, class_maps, score
from personalization.test_time.recipe import recipe_of
from training.local.loop import train_locally
from training.local.networks import network_of, new_network, state_of
from training.local.schedule import Schedule
from training.local.slices import Slices

CLASSES = 3
# Of training: what a step does beside the network's own work.
TRAININGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"augment": False},
    "augmented": {},
    "augmented, drawn scanners": {"intensity": 1.0},
    "dice and cross-entropy": {"augment": False, "loss": LOSSES["dice_ce"].function},
}
# Counted by this benchmark before a step was written for a GPU (commit 09a8d5bb): operations, waits, copies.
BEFORE: Mapping[str, tuple[int, int, int]] = {
    "training: plain": (775, 3, 2),
    "training: augmented": (775, 3, 2),
    "training: augmented, drawn scanners": (775, 3, 2),
    "training: dice and cross-entropy": (794, 3, 2),
    "adaptation: paper": (1855, 1, 1),
    "adaptation: official": (1887, 1, 1),
    "adaptation: as-published": (9315, 1, 70),
    "adaptation: tent": (741, 1, 0),
    "adaptation: ttt": (314, 1, 1),
    "adaptation: paper pooled": (6380, 1, 1),
    "measuring: paper": (605, 5, 1),
    "measuring: official": (618, 5, 1),
    "measuring: as-published": (2180, 5, 1),
    "measuring: tent": (332, 4, 0),
    "measuring: ttt": (160, 2, 1),
    "measuring: paper pooled": (2167, 5, 1),
    "gate: consensus": (708, 2, 8),
}


@dataclass(frozen=True)
class Profile:
    """The networks' width, the images' side, images per step; member hospitals beside the global model."""

    width: int = 2
    size: int = 32
    batch: int = 4
    members: int = 3


PROFILES = {"smoke": Profile(members=2), "cpu": Profile()}


class DeviceCalls(CostExperiment[Profile]):
    """The calls of a step of training, of adaptation, of measuring, and of the gate."""

    name = "device_calls"
    title = "What a step asks of a GPU"
    question = "How many operations, waits of the host and copies to the device does one step take on a GPU?"
    profiles = PROFILES
    by = "what"

    def kinds(self) -> Mapping[str, Kind]:
        """All are shown in one way."""
        titles = {
            "training": "One step of training a U-Net, by what it does beside the network's own work:",
            "adaptation": "One step of adaptation, by preset:",
            "measuring": "Measuring one batch after an epoch, by preset; no gradient:",
            "gate": "One batch of the gate, over all models:",
        }
        return {what: Kind(_measure, partial(_section, title)) for what, title in titles.items()}

    def measured(self) -> Sequence[Cell]:
        """Trainings, presets that learn, their measuring, the gate."""
        profile = self.profile
        common = {"width": profile.width, "size": profile.size, "batch": profile.batch}
        adapted = [
            *(name for name, preset in PRESETS.items() if preset.learns and preset.norm != "instance"),
            "paper pooled",
        ]
        members = {"K": profile.members}
        return [
            *({"what": "training", "name": name, **common} for name in TRAININGS),
            *({"what": "adaptation", "name": name, **members, **common} for name in adapted),
            *({"what": "measuring", "name": name, **members, **common} for name in adapted),
            {"what": "gate", "name": "consensus", **members, **common},
        ]


def _measure(cell: Cell, _work: Path) -> dict[str, int]:
    what: Mapping[str, Callable[[Cell], Callable[[int], object]]] = {
        "training": _training,
        "adaptation": _adaptation,
        "measuring": _measuring,
        "gate": _gate,
    }
    with PretendedCuda() as device:
        counts = []
        made = what[cell["what"]](cell)
        for steps in (2, 3):
            before = _totals(device)
            made(steps)
            counts.append({name: value - before[name] for name, value in _totals(device).items()})
    fewer, more = counts
    return {name: more[name] - fewer[name] for name in more}


def _totals(device: PretendedCuda) -> dict[str, int]:
    counters: Mapping[str, Counter[str]] = {
        "operations": device.operations,
        "waits": device.syncs,
        "copies": device.uploads,
    }
    return {name: counter.total() for name, counter in counters.items()}


def _training(cell: Cell) -> Callable[[int], object]:
    draw = np.random.default_rng(0)
    count, side = cell["batch"], cell["size"]
    data = Slices(
        draw.normal(size=(count, 1, side, side)).astype(np.float32),
        draw.integers(0, CLASSES, size=(count, side, side)).astype(np.uint8),
        *(tuple(map(str, range(count))),) * 2,
        tuple(range(count)),
    )
    spec = _spec(cell)
    state = state_of(new_network(spec, torch.Generator().manual_seed(0)))

    def train(steps: int) -> None:
        schedule = Schedule(steps=steps, batch_size=count, **TRAININGS[cell["name"]])
        network = network_of(spec, state, torch.device("cuda"))
        train_locally(network, data, schedule, torch.Generator().manual_seed(1))

    return train


def _learning(cell: Cell) -> tuple[Any, torch.Tensor, AdaptationConfig]:
    name, *router = cell["name"].split()
    config = AdaptationConfig.model_validate({"preset": name, **({"router": router[0]} if router else {})})
    recipe, space = recipe_of(name), space_of(_spec(cell, name), cell["K"])
    images = torch.randn(
        cell["batch"], 1, cell["size"], cell["size"], generator=torch.Generator().manual_seed(0)
    ).to("cuda")
    learning = recipe.learning(recipe.over(space, config), images, config, never_cancelled)
    assert learning is not None
    learning.network.to("cuda").requires_grad_(False)
    for parameters, _ in learning.groups:
        for parameter in parameters:
            parameter.requires_grad_(True)
    return learning, images, config


def _adaptation(cell: Cell) -> Callable[[int], object]:
    learning, images, config = _learning(cell)
    groups = [{"params": parameters, "lr": rate} for parameters, rate in learning.groups]
    optimiser = torch.optim.Adam(groups)
    learning.network.train()
    # As many as a step of the preset takes: one slice, of which it makes views, or the batch.
    chosen = learning.objective.epoch_batches(len(images), config, 1)[0]

    def step(steps: int) -> None:
        for seed in range(steps):
            batch = Batch.of(images, chosen).on(learning.network)
            learning.objective.step(learning.network, batch, config, optimiser, seed)

    # The first step makes the optimiser's moments.
    step(1)
    return step


def _measuring(cell: Cell) -> Callable[[int], object]:
    learning, images, config = _learning(cell)
    batch = Batch.of(images, torch.arange(len(images)))
    before = class_maps(learning.network, [batch], never_cancelled)

    def measure(steps: int) -> None:
        score(learning.objective, learning.network, [batch] * steps, config, before * steps, never_cancelled)

    return measure


def _gate(cell: Cell) -> Callable[[int], object]:
    space = space_of(_spec(cell), cell["K"])
    shape = (1, cell["size"], cell["size"])

    def judge(steps: int) -> None:
        images = torch.randn(16 * steps, *shape, generator=torch.Generator().manual_seed(0))
        consensus(space, images, device=torch.device("cuda"))

    return judge


def _spec(cell: Cell, preset: str = "") -> NetworkSpec:
    head = {"rotation_head": True} if preset == "ttt" else {}
    arguments = {"in_channels": 1, "classes": CLASSES, "width": cell["width"], **head}
    return NetworkSpec(name="unet", arguments=arguments)


def _section(title: str, rows: Sequence[Row]) -> list[str]:
    body = []
    for row in rows:
        cell, result = row["cell"], row["result"]
        before = BEFORE.get(f"{cell['what']}: {cell['name']}", ("",) * 3)
        pairs = zip(before, (result[name] for name in ("operations", "waits", "copies")), strict=True)
        body.append([cell["name"], *(f"{old} → {new}" if old != "" else str(new) for old, new in pairs)])
    return [title, table(["step", "operations", "waits", "copies"], body)]
