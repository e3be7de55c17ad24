"""Peak of resident memory, in MB, that loading and running a graph adds to a process (Linux).

    python -m benchmarks.cost.peak_memory GRAPH 8,1,128,128

Measured in a process of its own, without torch: a process's peak never decreases.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness.measuring import high_water
from service.inference.sessions import GraphSession


def peak_mb(graph: Path, shape: Sequence[int]) -> float:
    """The peak for images of this shape, measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.cost.peak_memory", str(graph), ",".join(map(str, shape))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _measure(graph: Path, shape: Sequence[int]) -> float:
    before = high_water()
    session = GraphSession(graph.name, graph.read_bytes(), threads=1, device="cpu")
    for _ in range(3):
        session.run(np.zeros(shape, np.float32))
    return (high_water() - before) / 1e6


if __name__ == "__main__":
    print(round(_measure(Path(sys.argv[1]), [int(side) for side in sys.argv[2].split(",")]), 1))
