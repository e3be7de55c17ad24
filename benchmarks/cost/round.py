"""Cost of a federated round over the training in it.

A round of the in-process engine (one worker process, one thread, checkpoint on disk after every round) is
compared with a plain PyTorch loop in a process of the same kind, which takes the same steps on the same data
and does nothing else. The two alternate, round by round. Medians are compared, and both must end with the
same weights. Processor time is compared too: other load on the machine disturbs it less.

The same steps are: validation of the global model, local training, the average in float64 and, for IOP-FL,
the moving average of each site's personal model and its validation. The plain loop keeps no best model,
writes no file and sends nothing.

The engine is then run with a method that sends weights to the sites and back without training: what remains
is the engine's own time. Its floor is the least work of a durable round with these bytes: the average of four
states in memory, and one synchronised write of the result.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.cost.round_sides import BATCH, RATE, SEED, SITES, TAU, Echo, plain_rounds, site_data
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.gpu import CPU, device_of
from benchmarks.harness.measuring import family, milliseconds, processor_seconds, quartiles
from benchmarks.harness.tables import table
from model_store.task import Task
from personalization.state import StreamingMean, to_safetensors
from training.algorithm import Memory
from training.choices.fedavg import FedAvgConfig
from training.engine.client import RunEnvironment
from training.engine.egress import SiteSpec
from training.engine.engine import FederationEngine
from training.engine.folder import RunFolder
from training.engine.history import RoundEntry, Silent
from training.methods.fedavg import FedAvg
from training.methods.iop_fl import IopFl, IopFlConfig
from training.state_tree import part

# The first rounds allocate memory and warm caches, on both sides.
WARM_UP = 2
# The limit for a round without training.
BOUND_MS = 20


@dataclass(frozen=True)
class Profile:
    """Rounds to time, of which the first two are dropped; ten times as many without training.

    The networks' `width` and the `widths` without training, the images' side, and slices per site.
    """

    rounds: int = 10
    width: int = 16
    widths: tuple[int, ...] = (4, 16, 32)
    size: int = 96
    slices: int = 64
    device: str = "cpu"


PROFILES = {
    "smoke": Profile(4, 2, (2,), 16, 8),
    "cpu": Profile(),
    "gpu": Profile(30, 32, (32, 64), 256, device="cuda"),
}


class RoundCost(CostExperiment[Profile]):
    """The cost of the engine's round."""

    name = "round_cost"
    title = "What a round costs"
    question = "What does federating cost over plain training?"
    profiles = PROFILES
    # A round does what the plain loop does, and more.
    possible = (0.9, 2.0)

    def kinds(self) -> Mapping[str, Kind]:
        """One kind."""
        return {"": Kind(compute, sections)}

    def measured(self) -> Sequence[Cell]:
        """Methods that train, then weights that travel without training."""
        settings = self.profile
        rounds, common = settings.rounds, {"size": settings.size, "slices": settings.slices}
        cells: list[Cell] = [
            *(
                {"method": method, "width": settings.width, "rounds": rounds, **common}
                for method in ("fedavg", "iop-fl")
            ),
            *(
                {"method": "none", "width": width, "rounds": 10 * rounds, **common}
                for width in settings.widths
            ),
        ]
        return cells


class Clock(Silent):
    """Observer that times the engine's rounds of training with their commit, and calls `between` after each.

    `processor` has the processor seconds of this process and all below it, without the process `apart`.
    """

    def __init__(self, between: Callable[[], None], apart: int | None) -> None:
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self._between = between
        self._apart = apart
        self._began = 0.0
        self._used = 0.0

    def round_started(self, phase: str, round: int, rounds: int, sites: tuple[str, ...]) -> None:  # noqa: ARG002
        """A round begins."""
        self._used = self._processor()
        self._began = time.perf_counter()

    def round_finished(self, entry: RoundEntry) -> None:
        """A round is over and on the disk."""
        if entry.phase == "train":
            self.seconds.append(time.perf_counter() - self._began)
            self.processor.append(self._processor() - self._used)
            self._between()

    def _processor(self) -> float:
        return processor_seconds(family(self._apart))


def compute(cell: Cell, work: Path) -> dict[str, Any]:
    """Measure one cell: seconds per round of both sides, their medians and the ratio."""
    width, slices, size, rounds = (cell[name] for name in ("width", "slices", "size", "rounds"))
    device = device_of(cell)
    task = Task(name="cost", labels={"disc": (1,)}, size=(size, size))
    settings = {
        "recipe": "paper",
        "width": width,
        "rounds": rounds,
        "batch_size": BATCH,
        "learning_rate": RATE,
    }
    personal = cell["method"] == "iop-fl"
    algorithm = (
        IopFl(IopFlConfig(**settings, tau=TAU), task)
        if personal
        else {"fedavg": FedAvg, "none": Echo}[cell["method"]](FedAvgConfig(**settings), task)
    )
    plain: list[tuple[float, float]] = []
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    trains = cell["method"] != "none"
    process = spawn.Process(
        target=plain_rounds, args=(there, width, slices, size, rounds, personal, device), daemon=True
    )
    floor = partial(_least_round, work / "floor", algorithm.initial(RunEnvironment(SEED).context("i", 0, 1)))

    def plain_round() -> None:
        here.send("go")
        plain.append(here.recv())

    if trains:
        process.start()
    clock = Clock(plain_round if trains else lambda: plain.append(floor()), process.pid)
    # A killed measurement starts again in a new folder: a part of its rounds is of no use.
    folder = RunFolder(work / f"run-{os.getpid()}")
    specs = [SiteSpec(site, partial(site_data, site, slices, size)) for site in SITES]
    environment = RunEnvironment(SEED, device)
    outcome = FederationEngine(algorithm, specs, environment, folder, workers=1, observer=clock).run()
    if trains:
        weights = here.recv()
        # On a GPU, copies between devices come at other places, and kernels may differ by the allocation.
        if device == CPU and weights != to_safetensors(part(outcome.server.tensors, "train/w_g")):
            raise RuntimeError("engine and plain loop ended with different weights: not the same steps")
        process.join()
    engine = clock.seconds[WARM_UP:]
    first, second = zip(*plain[WARM_UP:], strict=True)
    found: dict[str, Any] = {"engine_s": quartiles(engine), "rounds": len(engine)}
    if not trains:
        return {**found, "average_s": quartiles(first), "write_s": quartiles(second)}
    return {
        **found,
        "plain_s": quartiles(first),
        "ratio": round(median(engine) / median(first), 4),
        "processor_ratio": round(median(clock.processor[WARM_UP:]) / median(second), 4),
    }


def _least_round(path: Path, server: Memory) -> tuple[float, float]:
    """Seconds to average the weights of the sites, and seconds to write the result and sync it to disk."""
    started = time.perf_counter()
    mean = StreamingMean()
    for site in SITES:
        mean.add(server.tensors, 1.0, site)
    averaged = mean.result()
    averaging = time.perf_counter() - started
    content = to_safetensors(averaged)
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, content)
    os.fsync(descriptor)
    os.close(descriptor)
    return averaging, time.perf_counter() - began


def sections(found: Sequence[Row]) -> list[str]:
    """The page's tables."""
    cell = found[0]["cell"]
    trained = [
        [
            r["cell"]["method"],
            milliseconds(r["result"]["engine_s"]),
            milliseconds(r["result"]["plain_s"]),
            f"{r['result']['ratio']:.3f}",
            f"{r['result']['processor_ratio']:.3f}",
        ]
        for r in found
        if r["cell"]["method"] != "none"
    ]
    empty = [
        [
            f"U-Net, width {r['cell']['width']}",
            *(milliseconds(r["result"][f"{what}_s"]) for what in ("engine", "average", "write")),
        ]
        for r in found
        if r["cell"]["method"] == "none"
    ]
    return [
        f"Four sites of {cell['slices']} slices of {cell['size']}x{cell['size']}, U-Net of width "
        f"{cell['width']}, batch {BATCH}, one worker, one thread. "
        "Milliseconds per round: median [quartiles]; engine and plain loop alternate, and end with equal "
        "weights. The plain loop validates the global model, trains, averages in float64 and, for IOP-FL, "
        "keeps each site's moving average and validates it. It keeps no best model, writes no file and sends "
        "nothing. Both keep freed memory (`training.engine.worker`). Processor: the ratio of processor "
        "time, all processes together.",
        table(["method", "engine", "plain PyTorch", "ratio", "processor"], trained),
        "With no training in it: weights to four sites and back, averaged, checkpointed. Beside it the least "
        "that a durable round must do with these bytes: average four states in memory, and write the "
        "result once, synchronised, on the same disk.",
        table(["weights", "engine", "average alone", "write alone"], empty),
        _bound(found),
    ]


def _bound(found: Sequence[Row]) -> str:
    """The widths that keep the limit on a round without training."""
    medians = {
        r["cell"]["width"]: 1e3 * r["result"]["engine_s"]["median"]
        for r in found
        if r["cell"]["method"] == "none"
    }
    kept = [f"{width}" for width, value in medians.items() if value <= BOUND_MS]
    return (
        f"At most {BOUND_MS} ms was asked for. Kept at width: {', '.join(kept) or 'none'}. The time grows "
        "with the bytes, most of all that of the average in float64, which the plain loop takes too."
    )
