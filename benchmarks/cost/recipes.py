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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks.cost.adaptation import space_of
from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.cost.passes import Passes
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.gpu import awaited, device_of
from benchmarks.harness.measuring import alternated, milliseconds, quartiles
from benchmarks.harness.tables import table
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
# Forward passes over the cohort that `auto` may take, the judge included.
MOST_PASSES = 12
CLASSES = 2
# Parts of a recipe by name, in order; each gets what the one before it made, the first gets None.
Parts: TypeAlias = Mapping[str, Callable[[Any], Any]]


@dataclass(frozen=True)
class Profile:
    """The networks' width and the images' side; slices of the cohort, of one scan, and of a patient of the
    cohort; member hospitals beside the global model; how often each side is timed."""

    width: int = 16
    size: int = 96
    slices: int = 64
    scan: int = 8
    patient: int = 8
    members: int = 3
    repeats: int = 10
    device: str = "cpu"


PROFILES = {
    "smoke": Profile(2, 32, 20, 3, 5, 2, 2),
    "cpu": Profile(),
    "gpu": Profile(32, 256, repeats=30, device="cuda"),
}


class RecipeCost(CostExperiment[Profile]):
    """The cost of every preset, and of `auto`."""

    name = "recipe_cost"
    title = "What a recipe costs"
    question = "What does each recipe of adaptation cost, as a multiple of one plain pass?"
    profiles = PROFILES

    def kinds(self) -> Mapping[str, Kind]:
        """One kind."""
        return {"": Kind(compute, sections)}

    def measured(self) -> Sequence[Cell]:
        """`auto`, then every preset."""
        profile = self.profile
        common = {"size": profile.size, "width": profile.width, "K": profile.members}
        cohort = {"unit": "cohort", "slices": profile.slices}
        scan = {"unit": "scan", "slices": profile.scan}
        last = {"batch": BATCH, "repeats": profile.repeats}
        cells = [
            {"preset": AUTO, **cohort, **common, "patient": profile.patient, **last},
            *(
                {
                    **{"preset": name, **(scan if preset.unit == "scan" else cohort), **common},
                    **{"epochs": 1, **last, **VIEWS.get(name, {})},
                }
                for name, preset in PRESETS.items()
                if preset.norm != "instance"  # its network has batch norm
            ),
        ]
        return cells


def compute(cell: Cell, _work: Path) -> dict[str, Any]:
    """Count the passes of one recipe, and time it beside its floor."""
    device = device_of(cell)
    space = _space(cell["width"], cell["K"], rotation_head=cell["preset"] == "ttt")
    images = _images(cell["slices"], cell["size"]).to(device)
    plain = space.plain().to(device).eval()
    parts = parts_of(cell, space, images)
    passes = passes_of(parts, plain, images)
    steps = {
        "floor": awaited(lambda: _plain_pass(plain, images), device),
        "recipe": awaited(lambda: _run(parts), device),
    }
    kept = alternated(steps, cell["repeats"], WARM_UP)
    multiples = [ours / floor for ours, floor in zip(kept["recipe"], kept["floor"], strict=True)]
    return {
        "passes": passes,
        "recipe_s": quartiles(kept["recipe"]),
        "floor_s": quartiles(kept["floor"]),
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


def sections(rows: Sequence[Row]) -> list[str]:
    """The page: one table, and the floors."""
    header = ["preset", "adapts to", "passes forward", "passes backward", "multiple of a plain pass"]
    cell = rows[0]["cell"]
    parts = [
        f"U-Net of width {cell['width']} at {cell['size']}x{cell['size']}, a routing space of "
        f"{cell['K']} members and the global model, one epoch, one thread. Multiple: time of the "
        "recipe over that of one plain forward pass of the global model over the same images in batches of "
        f"{BATCH}, median [quartiles] of {cell['repeats']} repetitions; the two alternate in one process.",
        "Passes are counted per image, by the multiply-adds of convolutions: a pass that ends at a layer "
        "counts as the part that it computes, and a backward pass counts once, whatever it gives gradients "
        "of. For one scan, the answer counts too.",
        table(header, [_line(row) for row in rows]),
        " ".join(_floors(rows)),
    ]
    return [*parts, *(_bound(row) for row in rows if row["cell"]["preset"] == AUTO)]


def _line(row: Row) -> list[str]:
    cell, multiple = row["cell"], row["result"]["multiple"]
    counts = [f"{_total(row, direction):.1f}" for direction in ("forward", "backward")]
    middle, low, high = (f"{multiple[name]:.1f}" for name in ("median", "q1", "q3"))
    return [f"`{cell['preset']}`", f"{cell['slices']} slices", *counts, f"{middle} [{low}, {high}]"]


def _total(row: Row, direction: str) -> float:
    return float(sum(part[direction] for part in row["result"]["passes"].values()))


def _floors(rows: Sequence[Row]) -> list[str]:
    """One sentence per number of slices: the medians over the rows of the floor's median and quartiles."""
    found = []
    for slices in sorted({row["cell"]["slices"] for row in rows}, reverse=True):
        floors = [row["result"]["floor_s"] for row in rows if row["cell"]["slices"] == slices]
        middle = {name: median(floor[name] for floor in floors) for name in ("median", "q1", "q3")}
        found.append(f"The plain pass over {slices} slices takes {milliseconds(middle, 0)} ms.")
    return found


def _bound(row: Row) -> str:
    total, judge = _total(row, "forward"), row["result"]["passes"]["judge"]["forward"]
    time = row["result"]["multiple"]["median"]
    verdict = "kept" if total <= MOST_PASSES else "**missed**"
    return (
        f"`auto` takes the dose that the shift asks for, and judges it: {total:.1f} passes, "
        f"{judge:.1f} of them by the judge. At most {MOST_PASSES} are allowed: {verdict}. They take as long "
        f"as {time:.1f} plain passes, since a pass that measures statistics takes longer than a plain one."
    )
