"""Cost of a round over the network engine, over the in-process engine and over NVFLARE alone.

Weights travel to three sites and back, are averaged in float64 and written to disk; nothing is trained. All
sites are processes on this machine, connected by gRPC with mutual TLS over loopback where there is a network.
NVFLARE alone (`benchmarks.network.bare`) sends numpy arrays with its own encoding and streaming, takes the
same mean and writes the result once, without Locum's files, checks, history and checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.measuring import quartiles
from benchmarks.harness.tables import table
from benchmarks.network.consortium import Consortium, Member
from benchmarks.network.echo import EchoConfig, EchoWeights, enlist
from training.config import RunConfig
from training.engine.client import RunEnvironment
from training.engine.egress import SiteSpec
from training.engine.engine import FederationEngine
from training.engine.folder import RunFolder
from training.engine.history import RoundEntry, Silent
from training.engine.pool import Pool
from training.network.kits import Kit
from training.network.operator import Listener, Operator
from training.network.runs import NetworkRun
from training.phantom import write_federation
from training.phantom.federation import TASK

WARM_UP = 2


@dataclass(frozen=True)
class Profile:
    """Megabytes of weights for three sites, rounds (the first two are dropped), and the two extra cells."""

    megabytes: tuple[float, ...] = (4, 40, 400)
    rounds: int = 8
    many: int = 20
    large: float = 500


PROFILES = {"smoke": Profile((0.1,), 4, 2, 1), "cpu": Profile()}


class NetworkCost(CostExperiment[Profile]):
    """The cost of a network round."""

    name = "network_cost"
    title = "What a round over a network costs"
    question = "What does a round between hospitals cost over NVFLARE alone?"
    profiles = PROFILES

    def kinds(self) -> Mapping[str, Kind]:
        """One kind."""
        return {"": Kind(compute, sections)}

    def measured(self) -> Sequence[Cell]:
        """Three sites by size; then many sites; then large weights."""
        profile = self.profile
        sizes = [(3, size, profile.rounds) for size in profile.megabytes]
        extra = [(profile.many, profile.megabytes[0], profile.rounds), (3, profile.large, 4)]
        return [
            {"sites": sites, "megabytes": size, "rounds": rounds} for sites, size, rounds in [*sizes, *extra]
        ]


def compute(cell: Cell, work: Path) -> dict[str, Any]:
    """Measure one cell."""
    root = work / f"run-{time.time_ns()}"
    names = tuple(f"s{index:02}" for index in range(cell["sites"]))
    data = root / "data"
    source = write_federation(root / "source", ("aster",), patients_per_site=3, size=16)
    for name in names:
        data.mkdir(exist_ok=True)
        (data / name).symlink_to(source / "aster")
    TASK.model_copy(update={"size": (16, 16)}).dump(data / "task.yaml")
    with Consortium(root, data, names) as consortium:
        found = _network(consortium, cell, root)
    # NVFLARE keeps a cell's name for the life of a process, so each side has its own.
    with Consortium(root, data, names, port=consortium.port) as consortium:
        found |= _bare(consortium, cell, root)
    return found | _in_process(cell, root, names)


def sections(rows: Sequence[Row]) -> list[str]:
    """Seconds per round, ratios, and memory."""
    body = []
    memory = []
    for row in rows:
        cell, found = row["cell"], row["result"]
        network, bare = found["network_s"]["median"], found["bare_s"]["median"]
        body.append(
            [
                cell["sites"],
                f"{cell['megabytes']:g}",
                *(f"{found[f'{side}_s']['median']:.2f}" for side in ("in_process", "bare", "network")),
                f"{network / bare:.2f}",
                f"{network / found['in_process_s']['median']:.2f}",
            ]
        )
        memory.append(
            [
                cell["sites"],
                f"{cell['megabytes']:g}",
                *(f"{found[name]:.0f}" for name in ("operator_mb", "hospital_mb", "bare_mb")),
            ]
        )
    return [
        "Seconds per round, median. Weights to every site and back, the mean, and the result on disk; "
        "nothing is trained.",
        table(
            [
                "sites",
                "MB",
                "in-process",
                "NVFLARE alone",
                "network",
                "network / NVFLARE",
                "network / in-process",
            ],
            body,
        ),
        "Asked for: at most 1.15 times NVFLARE alone.",
        "## Memory",
        "Largest resident memory in MB of the operator's process, of a hospital's, and of NVFLARE's own "
        "sender. The mean holds a float64 total, which is twice the weights; a hospital's step holds the "
        "weights that it received and those that it returns.",
        table(["sites", "MB", "operator", "hospital", "NVFLARE alone"], memory),
    ]


class _Clock(Silent):
    """Observer that times rounds with their commit."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def round_started(self, phase: str, round: int, rounds: int, sites: tuple[str, ...]) -> None:  # noqa: ARG002
        """A round begins."""
        self._began = time.perf_counter()

    def round_finished(self, entry: RoundEntry) -> None:  # noqa: ARG002
        """A round is over and on the disk."""
        self.seconds.append(time.perf_counter() - self._began)


class _Memory:
    """The largest resident memory of processes, in MB, looked at ten times a second."""

    def __init__(self, *pids: int) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self.largest = dict.fromkeys(pids, 0.0)
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> dict[int, float]:
        """Stop looking, and return the figures by process."""
        self._over.set()
        return self.largest

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            for process in self._processes:
                try:
                    found = process.memory_info()
                    resident = (found.rss - found.shared) / 1e6
                except psutil.Error:
                    continue
                self.largest[process.pid] = max(self.largest[process.pid], resident)


def _network(consortium: Consortium, cell: Cell, root: Path) -> dict[str, Any]:
    """Rounds of the network engine, with the operator in a process of its own."""
    command = ["benchmarks.network.cost", str(root), json.dumps(cell)]
    operator = consortium.start("operator.log", *command)
    operator.wait_for("listening")
    sites = [consortium.start_site(site, module="benchmarks.network.echo") for site in consortium.sites]
    operator.wait_for("joined", 600)
    memory = _Memory(operator.process.pid, *(site.process.pid for site in sites))
    if operator.end(1800):
        raise RuntimeError(operator.text())
    largest = memory.stop()
    seconds: list[float] = json.loads(operator.text().splitlines()[-1])
    return {
        "network_s": quartiles(seconds[WARM_UP:]),
        "operator_mb": round(largest.pop(operator.process.pid)),
        "hospital_mb": round(max(largest.values())),
    }


def _operate(root: Path, cell: Cell) -> None:
    """The operator's process."""
    enlist()
    kit = Kit.open(root / "kits" / "server", server=True)
    config = EchoConfig(rounds=cell["rounds"], megabytes=cell["megabytes"])
    task = TASK.model_copy(update={"size": (16, 16)})
    sites = kit.content.sites
    run = NetworkRun(sites, "echo", config, RunConfig(), task)
    with Listener(kit) as listener, Operator(listener, root / "network", run) as operator:
        print("listening", flush=True)
        operator.gather(lambda _: None)
        print("joined", flush=True)
        seconds = _rounds(root / "network", cell, sites, operator)
    print(json.dumps(seconds), flush=True)


def _bare(consortium: Consortium, cell: Cell, root: Path) -> dict[str, Any]:
    """Rounds of NVFLARE alone."""
    kits = root / "kits"
    sites: list[Member] = []
    file = root / "bare.safetensors"
    server = consortium.start(
        "bare.log", "benchmarks.network.bare", kits / "server", cell["megabytes"], cell["rounds"], file
    )
    sites = [
        consortium.start(f"bare-{site}.log", "benchmarks.network.bare", kits / site)
        for site in consortium.sites
    ]
    memory = _Memory(server.process.pid)
    if server.end(1800):
        raise RuntimeError(server.text())
    for site in sites:
        site.kill()
    found = json.loads(server.text().splitlines()[-1])
    return {
        "bare_s": quartiles(found["round_s"][WARM_UP:]),
        "bare_transport_s": quartiles(found["transport_s"][WARM_UP:]),
        "bare_mb": round(memory.stop()[server.process.pid]),
    }


def _in_process(cell: Cell, root: Path, names: Sequence[str]) -> dict[str, Any]:
    seconds = _rounds(root / "local", cell, names, None)
    return {"in_process_s": quartiles(seconds[WARM_UP:])}


def _rounds(folder: Path, cell: Cell, names: Sequence[str], pool: Pool | None) -> list[float]:
    """Seconds of each round of an engine; without a pool, one worker process per core."""
    config = EchoConfig(rounds=cell["rounds"], megabytes=cell["megabytes"])
    clock = _Clock()
    specs = [SiteSpec(name, partial(int, 0)) for name in names]
    FederationEngine(
        EchoWeights(config, TASK),
        specs,
        RunEnvironment(0),
        RunFolder(folder),
        workers=min(os.cpu_count() or 1, len(specs)),
        observer=clock,
        pool=pool,
    ).run()
    return clock.seconds


if __name__ == "__main__":
    _operate(Path(sys.argv[1]), json.loads(sys.argv[2]))
