"""Cost of FedOAP's decoupled cross-attention over the plain U-Net of the same width.

One step of training (forward, loss, backward, AdamW; PyTorch) and the inference of one image (onnxruntime),
each on one thread, with attention to K - 1 other sites and with the plain bottleneck. The two alternate, step
by step; medians are compared. The floor is the ratio of their multiply-adds, counted operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cost.methods.cost import Cost, Result, compared
from benchmarks.harness.cells import Cell
from benchmarks.harness.gpu import awaited, device_of
from personalization.export import to_onnx
from personalization.fedoap.losses import binary_loss
from personalization.fedoap.parts import bank_state
from personalization.networks import FedOapUNet, build, initialise
from service.inference.providers import wanted_providers

SITES = (1, 3, 5, 9)
# Channels at full resolution (the paper has 64), the images' side, and repetitions of a step.
SIZES = {"smoke": (2, 32, 2), "cpu": (16, 128, 15), "gpu": (64, 256, 50)}


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


def compute(cell: Cell, _work: Path) -> Result:
    """Measure one cell: seconds of both sides, their ratio, and the ratio of multiply-adds."""
    size, batch = cell["size"], cell["batch"]
    sides = {
        "plain": network(cell["width"], size, 1, attention=False, adapter=False),
        "with": network(cell["width"], size, cell["sites"], attention=True, adapter=cell["adapter"]),
    }
    prepare = {"training": training, "inference": inference}[cell["mode"]]
    counted = {name: multiply_adds(net, size) for name, net in sides.items()}
    steps = {name: prepare(net, size, batch, device_of(cell)) for name, net in sides.items()}
    found = compared(steps["plain"], steps["with"], cell["repeats"])
    floor = counted["with"] / counted["plain"]
    return {
        **found,
        **{f"{name}_gmac": round(count / 1e9, 4) for name, count in counted.items()},
        "floor": round(floor, 4),
        "over_floor": round(found["ratio"] / floor, 4),
    }


def cells(size: str) -> Sequence[Cell]:
    """Training, then inference, by the number of sites; with the adapter, for three sites."""
    width, side, repeats = SIZES[size]
    return [
        {
            "mode": mode,
            "width": width,
            "size": side,
            "sites": sites,
            "adapter": adapter,
            "batch": batch,
            "repeats": repeats * scale,
        }
        for mode, batch, scale in (("training", 8, 1), ("inference", 1, 4))
        for sites, adapter in (*((sites, False) for sites in SITES), (3, True))
    ]


def case(cell: Cell) -> str:
    """What a line is about."""
    what = "a step" if cell["mode"] == "training" else "an image"
    return f"{what}, {cell['sites']} sites{', adapter' * cell['adapter']}"


ATTENTION = Cost("FedOAP: cross-attention over the plain U-Net", cells, compute, case)
