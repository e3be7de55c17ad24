"""Cost of each recipe of adaptation, as a multiple of one plain pass over the same images.

A recipe starts from a routing space and images and ends in one plain network. One that adapts to a single
scan ends in its answer, which counts too. `auto` measures the shift, takes the dose that this asks for and
judges it. The floor is one forward pass of the global model over the same images, in batches, without
gradients. The two alternate in one process; medians are compared. Passes are counted in a run of their own,
which is not timed.

The networks are random and learn for one epoch: neither decides the cost of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks.cost.methods.adaptation import space_of
from benchmarks.cost.methods.cost import METHOD, PLAIN, Cost, Result
from benchmarks.cost.methods.passes import Passes
from benchmarks.harness.cells import Cell
from benchmarks.harness.gpu import awaited, device_of
from benchmarks.harness.measuring import alternated, quartiles
from model_store.manifest import NetworkSpec
from personalization.dose import by_shift
from personalization.iop_fl.batch_norm import profile
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import Spread, sent_by
from personalization.options.presets import AUTO, PRESETS
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import Adapted, recipe_of

BATCH = 16
# The views of a slice, which are a step's batch in `ttt`.
VIEWS: Mapping[str, Mapping[str, int]] = {"ttt": {"batch": 32}}
# The first runs allocate memory and warm caches, on both sides.
WARM_UP = 1
CLASSES = 2
# Width, side, slices of the cohort, of one scan, and of a patient, members, repetitions.
SIZES = {
    "smoke": (2, 32, 20, 3, 5, 2, 2),
    "cpu": (16, 96, 64, 8, 8, 3, 10),
    "gpu": (32, 256, 64, 8, 8, 3, 30),
}
# Parts of a recipe by name, in order; each gets what the one before it made, the first gets None.
Parts: TypeAlias = Mapping[str, Callable[[Any], Any]]


def compute(cell: Cell, _work: Path) -> Result:
    """Count the passes of one recipe, and time it beside its floor."""
    device = device_of(cell)
    space = _space(cell["width"], cell["K"], rotation_head=cell["preset"] == "ttt")
    images = _images(cell["slices"], cell["size"]).to(device)
    plain = space.plain().to(device).eval()
    parts = parts_of(cell, space, images)
    passes = passes_of(parts, plain, images)
    steps = {
        PLAIN: awaited(lambda: _plain_pass(plain, images), device),
        METHOD: awaited(lambda: _run(parts), device),
    }
    kept = alternated(steps, cell["repeats"], WARM_UP)
    multiples = [ours / floor for ours, floor in zip(kept[METHOD], kept[PLAIN], strict=True)]
    return {
        "passes": passes,
        "seconds": {side: quartiles(values) for side, values in kept.items()},
        "multiple": quartiles(multiples),
    }


def parts_of(cell: Cell, space: RoutingSpace, images: Tensor) -> Parts:
    """The parts of a recipe: to adapt, and for one scan to answer; of `auto`, to dose and to judge."""
    device = torch.device(device_of(cell))
    if cell["preset"] == AUTO:
        patients = [index // cell["patient"] for index in range(len(images))]
        spread = _spread(space.plain().to(device), images, patients)
        return {
            "dose": lambda _: by_shift(space, spread, None, images, patients, device),
            "judge": lambda made: made.verdict,
        }
    config = AdaptationConfig(preset=cell["preset"], epochs=cell["epochs"], batch_size=cell["batch"])

    def adapt(_: object) -> Adapted:
        return recipe_of(config.preset).adapt(space, images, config, device)

    @torch.no_grad()
    def answer(adapted: Adapted) -> Tensor:
        # All slices at once: a recipe for one scan takes a batch as the scan.
        maps: Tensor = adapted.merged.to(device)(images).argmax(dim=1)
        return maps

    return {"adapt": adapt} | ({"answer": answer} if cell["unit"] == "scan" else {})


def passes_of(parts: Parts, plain: nn.Module, images: Tensor) -> dict[str, dict[str, float]]:
    """Passes forward and backward per image that each part makes, as multiples of one pass of `plain`."""
    with Passes() as one:
        _plain_pass(plain, images)
    found: dict[str, dict[str, float]] = {}
    made = None
    for name, part in parts.items():
        with Passes() as counted:
            made = part(made)
        found[name] = {
            "forward": round(counted.forward / one.forward, 3),
            "backward": round(counted.backward / one.forward, 3),
        }
    return found


def _run(parts: Parts) -> None:
    made = None
    for part in parts.values():
        made = part(made)


@torch.no_grad()
def _plain_pass(network: nn.Module, images: Tensor) -> None:
    for batch in torch.split(images, BATCH):
        network(batch)


def _space(width: int, members: int, *, rotation_head: bool = False) -> RoutingSpace:
    head = {"rotation_head": True} if rotation_head else {}
    arguments = {"in_channels": 1, "classes": CLASSES, "width": width, **head}
    return space_of(NetworkSpec(name="unet", arguments=arguments), members)


def _images(count: int, size: int, seed: int = 0) -> Tensor:
    """Noise."""
    return torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(seed))


def _spread(network: nn.Module, images: Tensor, patients: Sequence[int]) -> Spread:
    """Two members that are a tenth as far from the network's statistics, so that a dose is asked for."""
    found = profile(network, images, patients)
    sent = sent_by(found, None)
    near = {name: sent[name] / 10 for name in ("natural", "patient")}
    return Spread.of(found.layers, {**near, "logarithm": near["natural"].log()}, 2)


def cells(size: str) -> Sequence[Cell]:
    """`auto`, then every preset that moves batch norm, which the network has."""
    width, side, slices, scan, patient, members, repeats = SIZES[size]
    common = {"size": side, "width": width, "K": members}
    units = {"cohort": {"unit": "cohort", "slices": slices}, "scan": {"unit": "scan", "slices": scan}}
    last = {"batch": BATCH, "repeats": repeats}
    return [
        {"preset": AUTO, **units["cohort"], **common, "patient": patient, **last},
        *(
            {
                "preset": name,
                **units["scan" if preset.unit == "scan" else "cohort"],
                **common,
                "epochs": 1,
                **last,
                **VIEWS.get(name, {}),
            }
            for name, preset in PRESETS.items()
            if preset.norm != "instance"
        ),
    ]


def case(cell: Cell) -> str:
    """What a line is about."""
    return f"`{cell['preset']}`, {cell['slices']} slices"


def _also(result: Result) -> str:
    """Passes are counted per image; a pass that ends at a layer counts as the part that it computes."""
    forward, backward = (
        sum(part[direction] for part in result["passes"].values()) for direction in ("forward", "backward")
    )
    return f"{forward:.1f} passes forward, {backward:.1f} backward"


RECIPES = Cost("A recipe of adaptation over one plain pass of the same images", cells, compute, case, _also)
