"""Memory and time of a CT of 512 x 512 x 900 voxels in the service, besides the network.

    python -m benchmarks.cost.volume_memory [SLICES]

The network is a graph of one convolution, so what is measured is preparing, averaging and restoring: from
0.8 x 0.8 x 1 mm to 1.5 mm, patches of 96 voxels with an overlap of a quarter, three classes. Memory is what
the process takes at most above its decoded scan.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from model_store.scans.types import Scan
from model_store.task import Task

PATCH = (96, 96, 96)
SIDE = 512


@dataclass(frozen=True)
class _Manifest:
    task: Task
    statistics: None = None
    sources: None = None


def main(slices: int) -> None:
    """Prepare and segment a volume of noise; print what it took."""
    from model_store.preprocessing import prepare_volume
    from service.inference.pipeline import PreparedScan, Stopwatch, segment
    from service.inference.sessions import GraphSession

    task = Task.model_validate(
        {
            "name": "ct",
            "labels": {"liver": [1], "tumour": [2]},
            "normalisation": {"method": "fixed", "mean": 40, "std": 80, "window": [-160, 240]},
            "geometry": {"spacing": [1.5, 1.5, 1.5], "patch": PATCH, "overlap": 0.25},
        }
    )
    session = GraphSession("sha256:one-convolution", _graph(), threads=1, device="cpu")
    session.run_alone(np.zeros((1, 1, *PATCH), np.float32))
    rng = np.random.default_rng(0)
    # As a NIfTI is stored: slice by slice.
    voxels = np.empty((SIDE, SIDE, slices, 1), np.int16, order="F")
    for index in range(slices):
        voxels[:, :, index, 0] = rng.integers(-1000, 1000, (SIDE, SIDE), np.int16)
    scan = Scan(voxels, np.diag([-0.8, -0.8, 1.0, 1.0]), "nifti")
    before, watch, manifest = _most(), Stopwatch(), _Manifest(task)
    started = time.process_time()
    with watch.stage("prepare"):
        prepared = prepare_volume(scan, task)
    at_prepare = _most()
    found = segment(PreparedScan(b"", scan, prepared, ()), _as(manifest), session, watch)
    cpu, in_all = time.process_time() - started, _most()
    counts = [int(np.count_nonzero(found.classes == index)) for index in range(3)]
    print(f"{SIDE} x {SIDE} x {slices}, scan {voxels.nbytes / 2**20:.0f} MiB, grid {prepared.grid.shape}")
    print(f"classes {counts}")
    print(f"above the scan: {at_prepare - before:.0f} MiB prepared, {in_all - before:.0f} MiB in all")
    print(f"CPU {cpu:.1f} s: " + ", ".join(f"{name} {ms / 1000:.1f} s" for name, ms in watch.stages.items()))


def _as(manifest: Any) -> Any:
    return manifest


def _most() -> float:
    """MiB that the process took at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _graph() -> bytes:
    weights = helper.make_tensor("w", TensorProto.FLOAT, [3, 1, 1, 1, 1], [0.0, 1.0, 2.0])
    bias = helper.make_tensor("b", TensorProto.FLOAT, [3], [0.0, 0.5, -0.5])
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["image", "w", "b"], ["logits"], kernel_shape=[1, 1, 1]),
            helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        ],
        "one convolution",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 1, *PATCH])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [1, 3, *PATCH])],
        [weights, bias],
    )
    content: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    ).SerializeToString()
    return content


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 900)
