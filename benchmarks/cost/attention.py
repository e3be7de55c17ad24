"""Cost of FedOAP's decoupled cross-attention over the plain U-Net of the same width.

One step of training (forward, loss, backward, AdamW; PyTorch) and the inference of one image (onnxruntime),
each on one thread, with attention to K - 1 other sites and with the plain bottleneck. The two alternate, step
by step; medians are compared. The floor is the ratio of their multiply-adds, counted operator by operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.gpu import awaited, device_of
from benchmarks.harness.measuring import alternated, milliseconds, quartiles
from benchmarks.harness.tables import table
from personalization.export import to_onnx
from personalization.fedoap.losses import binary_loss
from personalization.fedoap.parts import bank_state
from personalization.networks import FedOapUNet, build, initialise
from service.inference.providers import wanted_providers

SITES = (1, 3, 5, 9)
# What the method's specification allows, as a multiple of the floor.
BOUND = 1.1
# The first steps allocate memory and warm caches, on both sides.
WARM_UP = 3


@dataclass(frozen=True)
class Profile:
    """Channels at full resolution (the paper's is 64), the images' side, and steps to time on each side."""

    width: int = 16
    size: int = 128
    repeats: int = 15
    device: str = "cpu"


PROFILES = {
    "smoke": Profile(2, 32, 2),
    "cpu": Profile(),
    "gpu": Profile(64, 256, 50, "cuda"),
}


class AttentionCost(CostExperiment[Profile]):
    """The cost of decoupled cross-attention, in training and in serving."""

    name = "attention_cost"
    title = "What cross-attention costs"
    question = "What does cross-attention cost over the plain U-Net?"
    profiles = PROFILES
    by = "mode"

    def kinds(self) -> Mapping[str, Kind]:
        """How each kind of cell is measured, and how its rows are shown."""
        return {"training": Kind(compute, _trained), "inference": Kind(compute, _inferred)}

    def measured(self) -> Sequence[Cell]:
        """Training, then inference, by the number of sites; with the adapter, for three sites."""
        cells = [
            {
                "mode": mode,
                "width": self.profile.width,
                "size": self.profile.size,
                "sites": sites,
                "adapter": adapter,
                "batch": batch,
                "repeats": self.profile.repeats * scale,
            }
            for mode, batch, scale in (("training", 8, 1), ("inference", 1, 4))
            for sites, adapter in (*((sites, False) for sites in SITES), (3, True))
        ]
        return cells


def network(width: int, size: int, sites: int, *, attention: bool, adapter: bool) -> FedOapUNet:
    """A network with a bank of noise for `sites` - 1 others."""
    generator = torch.Generator().manual_seed(0)
    arguments: dict[str, Any] = {
        "in_channels": 1,
        "width": width,
        "attention": attention,
        "adapter": adapter,
        "groups": 16,
    }
    result = initialise(build("fedoap", **arguments), generator)
    if attention:
        tokens, features = (size // 16) ** 2, 16 * width
        entries = {
            f"site-{site:02}": {
                name: torch.randn(tokens, features, generator=generator) for name in ("key", "value")
            }
            for site in range(sites - 1)
        }
        bank = bank_state(entries, features)
        state = {**result.state_dict(), **bank}
        result = build("fedoap", **arguments, sites=sites - 1, tokens=bank["bank_key"].shape[1])
        result.load_state_dict(state)
    result.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # absent from torch's stubs
    assert isinstance(result, FedOapUNet)
    return result


def multiply_adds(net: FedOapUNet, size: int) -> int:
    """Multiply-adds of one image's forward pass: convolutions and matrix products."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net.segment(torch.zeros(1, 1, size, size))
    return int(counter.get_total_flops()) // 2


def training(net: FedOapUNet, size: int, batch: int, device: str) -> Callable[[], object]:
    """A function that takes one step of training."""
    net.to(device)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 1, size, size, generator=generator).to(device)
    targets = (images[:, 0] > 1).to(torch.uint8)
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(binary_loss(net.segment(images)[0], targets))
        optimiser.step()

    return awaited(step, device)


def inference(net: FedOapUNet, size: int, batch: int, device: str) -> Callable[[], object]:
    """A function that runs the exported graph once."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    graph = to_onnx(net, 1, (size, size))
    session = onnxruntime.InferenceSession(graph, options, providers=wanted_providers(device))
    image = np.random.default_rng(0).normal(size=(batch, 1, size, size)).astype(np.float32)
    return lambda: session.run(None, {"image": image})


def compute(cell: Cell, _work: Path) -> dict[str, Any]:
    """Measure one cell: seconds of both sides, their ratio, and the ratio of multiply-adds."""
    size, batch = cell["size"], cell["batch"]
    sides = {
        "plain": network(cell["width"], size, 1, attention=False, adapter=False),
        "with": network(cell["width"], size, cell["sites"], attention=True, adapter=cell["adapter"]),
    }
    prepare = {"training": training, "inference": inference}[cell["mode"]]
    counted = {name: multiply_adds(net, size) for name, net in sides.items()}
    steps = {name: prepare(net, size, batch, device_of(cell)) for name, net in sides.items()}
    kept = alternated(steps, cell["repeats"], WARM_UP)
    ratio, floor = median(kept["with"]) / median(kept["plain"]), counted["with"] / counted["plain"]
    return {
        **{f"{name}_s": quartiles(values) for name, values in kept.items()},
        **{f"{name}_gmac": round(count / 1e9, 4) for name, count in counted.items()},
        "ratio": round(ratio, 4),
        "floor": round(floor, 4),
        "over_floor": round(ratio / floor, 4),
    }


def _trained(rows: Sequence[Row]) -> list[str]:
    cell = rows[0]["cell"]
    return [
        f"U-Net of width {cell['width']} on {cell['size']}x{cell['size']}, one thread. Median "
        "[quartiles]. The floor is the ratio of multiply-adds of a forward pass; instance norms, softmax "
        "and the optimiser count nothing in it.",
        "One training step, batch 8 (PyTorch).",
        *_compared(rows),
    ]


def _inferred(rows: Sequence[Row]) -> list[str]:
    return ["One image (onnx).", *_compared(rows)]


def _compared(rows: Sequence[Row]) -> list[str]:
    header = ["sites K", "adapter", "plain, ms", "with attention, ms", "ratio", "floor", "over floor"]
    return [table(header, [_line(row) for row in rows]), _verdict(rows)]


def _verdict(rows: Sequence[Row]) -> str:
    """Whether attention keeps the bound. The adapter's work at full resolution is not in the floor."""
    worst = {
        adapter: max(
            (row["result"]["over_floor"] for row in rows if row["cell"]["adapter"] is adapter),
            default=math.nan,
        )
        for adapter in (False, True)
    }
    within = "within" if worst[False] <= BOUND else "**not within**"
    return (
        f"Attention is {within} {BOUND} of its floor (at most {worst[False]:.3f}). With the adapter it is at "
        f"most {worst[True]:.3f}: its instance norm, ReLU and sum at full resolution count no multiply-adds."
    )


def _line(row: Row) -> list[str]:
    cell, result = row["cell"], row["result"]
    sides = [milliseconds(s) for s in (result["plain_s"], result["with_s"])]
    ratios = [f"{result[name]:.3f}" for name in ("ratio", "floor", "over_floor")]
    return [str(cell["sites"]), "yes" if cell["adapter"] else "no", *sides, *ratios]
