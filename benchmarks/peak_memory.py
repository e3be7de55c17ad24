"""What loading and running an onnx graph adds to a process's peak of resident memory, in MB (Linux).

    python -m benchmarks.peak_memory GRAPH 8,1,128,128

A process of its own, without torch: peaks are never given back.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from benchmarks.measuring import high_water


def peak_mb(graph: Path, shape: Sequence[int]) -> float:
    """For images of that shape, measured in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.peak_memory", str(graph), ",".join(map(str, shape))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def session(graph: bytes | str) -> onnxruntime.InferenceSession:
    """A graph on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _measure(graph: str, shape: Sequence[int]) -> float:
    before = high_water()
    loaded = session(graph)
    for _ in range(3):
        loaded.run(None, {"image": np.zeros(shape, np.float32)})
    return (high_water() - before) / 1e6


if __name__ == "__main__":
    print(round(_measure(sys.argv[1], [int(side) for side in sys.argv[2].split(",")]), 1))
