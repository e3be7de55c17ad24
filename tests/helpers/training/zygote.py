"""A process with all imports done that forks runs of a federation, so that a run starts at once.

Reads one JSON line per run: {"data", "folder", "store", "workers", "method", "config"}. The run is its own
process group; its pid is printed, then its exit status when it has ended. Workers are forked too: the tests
examine how a run survives a kill, not how long Python takes to import.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

import torch

from model_store.store import Store
from training.config import RunConfig
from training.data.federation import load_federation
from training.engine import pool
from training.methods.registry import method
from training.run import Run, execute


def run(command: dict) -> None:
    torch.set_num_threads(1)
    pool.process_context = lambda: context
    # A forked worker inherits both ends of its pipe and never sees it closed: do not wait for it to end.
    pool._GOODBYE_S = 0.0
    job = Run(
        load_federation(Path(command["data"])),
        command["method"],
        method(command["method"]).config(**{"width": 2, "learning_rate": 0.01} | command["config"]),
        RunConfig(seed=3, consent="all", participation=0.7),
    )
    execute(
        job,
        Path(command["folder"]),
        workers=command["workers"],
        resume=True,
        store=Store(Path(command["store"])),
    )


context = multiprocessing.get_context("fork")
torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # imports what a first optimiser imports
print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        status = 1
        try:
            run(json.loads(line))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    # By both: who reads the pid can kill the group, and the run starts no worker outside it.
    os.setpgid(pid, pid)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
