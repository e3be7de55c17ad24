"""Cost of a softmax over the classes: onnxruntime's own against one in passes (`model_store.softmax`).

The same exported network, once with its Softmax and once as the service loads it on a CPU, each in a session
of one thread. Runs of one image or patch alternate; each pair gives a ratio of processor time. What both
answer is compared, and the peak of memory is that of a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from benchmarks.cost.methods.cost import METHOD, PLAIN, Cost, Result
from benchmarks.harness.cells import Cell
from benchmarks.harness.measuring import alternated, high_water, in_new_process, quartiles
from model_store.graphs import parse_graph
from model_store.softmax import write_softmax_in_passes
from personalization.export import to_onnx
from personalization.networks import build, initialise

WARM_UP = 2
SIDES = (METHOD, PLAIN)
_VOLUMES = "monai.basicunet"
# Sides of the input by the number of classes, of slices and of volumes; width, and pairs to time.
SIZES: Mapping[str, tuple[Mapping[int, int], Mapping[int, int], int, int]] = {
    "smoke": ({2: 32}, {3: 32}, 2, 2),
    "cpu": ({2: 256, 8: 256}, {3: 64, 25: 64, 105: 64}, 16, 9),
}


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


def compute(cell: Cell, _work: Path) -> Result:
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
        "ratio": quartiles([one / other for one, other in zip(kept[METHOD], kept[PLAIN], strict=True)]),
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


def cells(size: str) -> Sequence[Cell]:
    """Slices, then volumes, by the number of classes; none for a GPU, which has its own Softmax."""
    if size not in SIZES:
        return []
    slices, volumes, width, repeats = SIZES[size]
    return [
        {
            "network": network,
            "dimensions": dimensions,
            "classes": classes,
            "side": side,
            "width": width,
            "repeats": repeats,
        }
        for network, dimensions, sides in (("unet", 2, slices), (_VOLUMES, 3, volumes))
        for classes, side in sides.items()
    ]


def case(cell: Cell) -> str:
    """What a line is about."""
    sides = "x".join([str(cell["side"])] * cell["dimensions"])
    return f"{cell['classes']} classes at {sides}"


def _also(result: Result) -> str:
    return f"{result['classes_that_differ']} classes differ"


SOFTMAX = Cost(
    "onnxruntime's Softmax (method) over one in passes (plain), processor time", cells, compute, case, _also
)
