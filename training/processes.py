"""How a run starts its worker processes."""

from __future__ import annotations

import multiprocessing
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Windows has no ForkServerContext
    from multiprocessing.context import ForkServerContext, SpawnContext

# What the processes of a run import. torch imports its compiler for the first optimiser of a process, and
# scipy's images measure surfaces.
PRELOADED = ["training.engine.worker", "training.report.site_pages", "torch._dynamo", "scipy.ndimage"]


def process_context() -> ForkServerContext | SpawnContext:
    """Return the context in which a run starts its processes.

    On Linux each process is a copy of a server process that has imported what they need, so the imports are
    made once. A copy of the calling process would inherit torch's thread pools in an undefined state.
    Elsewhere each process starts empty: system libraries of macOS fail in a copy, and Windows has none.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
