"""Cost of a softmax over the classes: onnxruntime's own against one in passes (`model_store.softmax`).

The same exported network, once with its Softmax and once as the service loads it on a CPU, each in a session
of one thread. Runs of one image or patch alternate; each pair gives a ratio of processor time. What both
answer is compared, and the peak of memory is that of a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.measuring import alternated, high_water, in_new_process, milliseconds, quartiles
from benchmarks.harness.tables import table
from model_store.graphs import parse_graph
from model_store.softmax import write_softmax_in_passes
from personalization.export import to_onnx
from personalization.networks import build, initialise

WARM_UP = 2
SIDES = ("Softmax", "in passes")
_VOLUMES = "monai.basicunet"


@dataclass(frozen=True)
class Profile:
    """Sides of the input by the number of classes, of slices and of volumes; pairs to time."""

    slices: Mapping[int, int]
    volumes: Mapping[int, int]
    width: int = 16
    repeats: int = 9


PROFILES = {
    "smoke": Profile({2: 32}, {3: 32}, width=2, repeats=2),
    "cpu": Profile({2: 256, 8: 256}, {3: 64, 25: 64, 105: 64}),
}


class SoftmaxCost(CostExperiment[Profile]):
    """The cost of a softmax over the classes."""

    name = "softmax_cost"
    title = "What a softmax costs"
    question = "What does a softmax over the classes cost in onnxruntime, and in passes?"
    profiles = PROFILES

    def kinds(self) -> Mapping[str, Kind]:
        """One kind."""
        return {"": Kind(compute, _section)}

    def measured(self) -> Sequence[Cell]:
        """Slices, then volumes, by the number of classes."""
        profile = self.profile
        return [
            {
                "network": network,
                "dimensions": dimensions,
                "classes": classes,
                "side": side,
                "width": profile.width,
                "repeats": profile.repeats,
            }
            for network, dimensions, sides in (("unet", 2, profile.slices), (_VOLUMES, 3, profile.volumes))
            for classes, side in sides.items()
        ]


def graphs(cell: Cell) -> dict[str, bytes]:
    """The exported network, by side."""
    arguments: dict[str, Any] = {"in_channels": 1, "classes": cell["classes"], "width": cell["width"]}
    if cell["network"] == _VOLUMES:
        arguments |= {"spatial_dims": cell["dimensions"]}
    network = initialise(build(cell["network"], **arguments), torch.Generator().manual_seed(0))
    exported = to_onnx(network, 1, [cell["side"]] * cell["dimensions"])
    model = parse_graph(exported, cell["network"])
    assert write_softmax_in_passes(model)
    return dict(zip(SIDES, (exported, model.SerializeToString()), strict=True))


def session_of(graph: bytes) -> onnxruntime.InferenceSession:
    """A session of one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def image_of(cell: Cell) -> NDArray[np.float32]:
    """Noise [1, 1, ...] of the cell's sides."""
    shape = (1, 1, *[cell["side"]] * cell["dimensions"])
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def compute(cell: Cell, _work: Path) -> dict[str, Any]:
    """Processor seconds of both, their ratio by pairs, how far apart their answers are, and their memory."""
    made, image = graphs(cell), image_of(cell)
    sessions = {side: session_of(graph) for side, graph in made.items()}
    answers = [session.run(["probabilities"], {"image": image})[0] for session in sessions.values()]
    steps = {
        side: lambda session=session: session.run(["probabilities"], {"image": image})
        for side, session in sessions.items()
    }
    kept = alternated(steps, cell["repeats"], WARM_UP, time.process_time)
    return {
        "seconds": {side: quartiles(values) for side, values in kept.items()},
        "ratio": quartiles([one / other for one, other in zip(*kept.values(), strict=True)]),
        "apart": float(np.abs(answers[0] - answers[1]).max()),
        "classes_that_differ": int((answers[0].argmax(axis=1) != answers[1].argmax(axis=1)).sum()),
        "peak_bytes": {side: in_new_process(peak_bytes, graph, dict(cell)) for side, graph in made.items()},
    }


def peak_bytes(graph: bytes, cell: Cell) -> int:
    """What loading and running a graph adds to this process's peak of memory; Linux only."""
    image, before = image_of(cell), high_water()
    session = session_of(graph)
    for _ in range(2):
        session.run(["probabilities"], {"image": image})
    return high_water() - before


def _section(rows: Sequence[Row]) -> list[str]:
    header = ["network", "classes", "input", "Softmax, ms", "in passes, ms", "ratio"]
    header += ["largest difference", "classes that differ", "peak memory, MiB"]
    return [
        f"Width {rows[0]['cell']['width']}, random weights, one image of noise a run, one thread. "
        "Milliseconds of processor time: median [quartiles]; the ratio is that of the pairs, in turn. Peak "
        "memory is what loading and running add: Softmax, and in passes.",
        table(header, [_line(row) for row in rows]),
    ]


def _line(row: Row) -> list[str]:
    cell, result = row["cell"], row["result"]
    ratio = result["ratio"]
    return [
        "U-Net" if cell["network"] == "unet" else "MONAI's BasicUNet",
        str(cell["classes"]),
        "x".join([str(cell["side"])] * cell["dimensions"]),
        *(milliseconds(result["seconds"][side]) for side in SIDES),
        f"{ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]",
        f"{result['apart']:.1e}",
        str(result["classes_that_differ"]),
        ", ".join(f"{result['peak_bytes'][side] / 2**20:.0f}" for side in SIDES),
    ]
