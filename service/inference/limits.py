"""What a graph may hold and cost, wherever one is run: in the API and in the worker."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# The memory limit of a container: version 2 and version 1 of control groups.
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True)
class GraphLimits:
    """Limits of every graph.

    Attributes:
        operators: allowed beyond those of `model_store.graphs`.
        seconds_per_slice: of a run, for each of its slices; a run that takes longer is ended. A load may take
            as long as a run of five slices, and a minute at least.
        memory_bytes: of all runs on the CPU in this process together; 0 for three quarters of the memory.
        gpu_memory_bytes: of one graph on a GPU, weights and runs; 0 for no bound.
        tensorrt: whether onnxruntime is asked for its provider TensorRT before CUDA.
    """

    operators: tuple[str, ...] = ()
    seconds_per_slice: float = 60
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    tensorrt: bool = False

    @property
    def memory(self) -> int:
        """The bytes in force."""
        return self.memory_bytes or 3 * _memory_of_machine() // 4


def _memory_of_machine() -> int:
    """Bytes of memory of the machine, or of the container in it."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        # "max" is no number.
        with suppress(OSError, ValueError):
            found = min(found, int(path.read_text(encoding="ascii")))
    return found
