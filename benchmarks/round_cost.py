"""What a federated round costs beside the training in it.

    python -m benchmarks.round_cost --rows docs/results/round_cost.jsonl

A round of the in-process engine (one worker process, one thread, checkpoint on disk after every round)
against a plain PyTorch loop in a process of the same kind, which takes the same steps on the same data and
does nothing else. The two alternate, round by round. Medians are compared, and both must end with the same
weights.

The engine is then run with a method that sends weights to and fro and trains nothing: what is left is the
engine's own time. Its floor is the least that a durable round must do with these bytes: one synchronised
write of the server's weights.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.harness import STATE_DIR, Cell, Rows, run
from benchmarks.tables import table, write_page
from model_store.task import Task
from personalization.losses import soft_dice_loss
from personalization.networks import build, initialise
from personalization.state import to_safetensors
from training.algorithm import ClientResult, Context, Memory, State
from training.data.classified import LabelledData
from training.data.dataset import SiteData, SliceSet, batches
from training.engine.client import Surroundings
from training.engine.egress import SiteSpec
from training.engine.folder import RunFolder
from training.engine.history import RoundEntry, Silent
from training.engine.in_process import InProcessEngine
from training.methods.fedavg import SCORES, WEIGHTS, FedAvg, FedAvgConfig
from training.methods.iop_fl import IopFl, IopFlConfig
from training.methods.local import dice_per_patient
from training.methods.trees import part

SITES = ("CS", "DU", "FG", "HT")
SEED = 0
BATCH = 16
RATE = 1e-3
TAU = 0.9
# The first rounds allocate memory and warm caches, on both sides.
WARM_UP = 2


class Echo(FedAvg):
    """FedAvg without the learning: every site returns the weights it received."""

    def client_step(
        self,
        context: Context,
        received: Mapping[str, State],
        memory: Memory,
        data: SiteData | LabelledData,
    ) -> ClientResult:
        """Send back what came."""
        if context.phase == "describe":
            return super().client_step(context, received, memory, data)
        uploads: dict[str, State] = {SCORES.name: {"score": torch.zeros(2, dtype=torch.float64)}}
        if context.phase == "train":
            uploads[WEIGHTS.name] = received[WEIGHTS.name]
        return ClientResult(uploads, 1.0)


def site_data(site: str, slices: int, size: int) -> SiteData:
    """Noise with a disc in it: what the pixels show does not matter for what a step costs."""
    generator = np.random.default_rng(list(site.encode()))
    radius = np.hypot(*np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j])

    def drawn(count: int) -> SliceSet:
        targets = np.repeat((radius < 0.5).astype(np.uint8)[None], count, axis=0)
        noise = generator.normal(size=(count, 1, size, size)).astype(np.float32)
        names = tuple(f"{site}-{i // 8}" for i in range(count))
        return SliceSet(noise + targets[:, None], targets, names, names, tuple(range(count)))

    return SiteData(site, drawn(slices), drawn(slices // 4), drawn(0), None)


def plain_rounds(pipe: Connection, width: int, slices: int, size: int, rounds: int, personal: bool) -> None:
    """The other side: one round for every message, answered by its seconds; at last the weights."""
    torch.set_num_threads(1)
    surroundings = Surroundings(SEED)
    sites = {site: site_data(site, slices, size) for site in SITES}
    network = build("unet", in_channels=1, classes=2, width=width)
    initialise(network, surroundings.context("initial", 0, 1).generator("weights"))
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # absent from torch's stubs
    shared = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    followers = {site: {name: tensor.clone() for name, tensor in shared.items()} for site in SITES}
    for round_ in range(rounds):
        pipe.recv()
        began = time.perf_counter()
        sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in shared.items()}
        for site, data in sites.items():
            network.load_state_dict(shared)
            dice_per_patient(network, data.val, 2, BATCH)
            network.train()
            optimiser = torch.optim.Adam(network.parameters(), lr=RATE)
            generator = surroundings.context("train", round_, rounds, site).generator("train")
            for images, targets in batches(data.train, BATCH, generator, augment=True):
                optimiser.zero_grad(set_to_none=True)
                loss = soft_dice_loss(network(images), targets)
                torch.autograd.backward(loss)
                optimiser.step()
                loss.item()
            trained = network.state_dict()
            for name, total in sums.items():
                total.add_(trained[name].double(), alpha=len(data.train))
            if personal:
                for name, follower in followers[site].items():
                    follower.copy_((1 - TAU) * follower.double() + TAU * trained[name].double())
                network.load_state_dict(followers[site])
                dice_per_patient(network, data.val, 2, BATCH)
        weight = sum(len(data.train) for data in sites.values())
        shared = {name: (total / weight).to(shared[name].dtype) for name, total in sums.items()}
        pipe.send(time.perf_counter() - began)
    # Tensors in a pipe would share memory with a process about to end; bytes do not.
    pipe.send(to_safetensors(shared))


class Clock(Silent):
    """Times the engine's rounds of training, commit included, and lets something else run after each."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.seconds: list[float] = []
        self._between = between
        self._began = 0.0

    def round_started(self, phase: str, round: int, rounds: int, sites: tuple[str, ...]) -> None:  # noqa: ARG002
        """A round begins."""
        self._began = time.perf_counter()

    def round_finished(self, entry: RoundEntry) -> None:
        """A round is over and on the disk."""
        if entry.phase == "train":
            self.seconds.append(time.perf_counter() - self._began)
            self._between()


def compute(cell: Cell, work: Path) -> dict[str, Any]:
    """Measure one cell: seconds per round of both sides, their medians and the ratio."""
    torch.set_num_threads(1)
    width, slices, size, rounds = (cell[name] for name in ("width", "slices", "size", "rounds"))
    task = Task(name="cost", labels={"disc": (1,)}, size=(size, size))
    settings = {"width": width, "rounds": rounds, "batch_size": BATCH, "learning_rate": RATE}
    personal = cell["method"] == "iop-fl"
    algorithm = (
        IopFl(IopFlConfig(**settings, tau=TAU), task)
        if personal
        else {"fedavg": FedAvg, "none": Echo}[cell["method"]](FedAvgConfig(**settings), task)
    )
    plain: list[float] = []
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    trains = cell["method"] != "none"
    process = spawn.Process(
        target=plain_rounds, args=(there, width, slices, size, rounds, personal), daemon=True
    )
    floor = partial(
        _synchronised_write, work / "floor", algorithm.initial(Surroundings(SEED).context("i", 0, 1))
    )

    def plain_round() -> None:
        here.send("go")
        plain.append(here.recv())

    if trains:
        process.start()
    clock = Clock(plain_round if trains else lambda: plain.append(floor()))
    # A killed measurement starts anew: half of one is worth nothing.
    folder = RunFolder(work / f"run-{os.getpid()}")
    specs = [SiteSpec(site, partial(site_data, site, slices, size)) for site in SITES]
    outcome = InProcessEngine(algorithm, specs, Surroundings(SEED), folder, workers=1, observer=clock).run()
    if trains:
        if here.recv() != to_safetensors(part(outcome.server.tensors, "global")):
            raise RuntimeError("engine and plain loop ended with different weights: not the same steps")
        process.join()
    engine, other = clock.seconds[WARM_UP:], plain[WARM_UP:]
    return {
        "engine_s": _summary(engine),
        "floor_s" if not trains else "plain_s": _summary(other),
        "ratio": round(median(engine) / median(other), 4),
        "rounds": len(engine),
    }


def _synchronised_write(path: Path, server: Memory) -> float:
    """Seconds to write the server's weights over a file and wait for the disk."""
    content = to_safetensors(server.tensors)
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, content)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - began


def _summary(seconds: list[float]) -> dict[str, float]:
    quarter, middle, three_quarters = quantiles(seconds, n=4)
    return {"median": round(middle, 5), "q1": round(quarter, 5), "q3": round(three_quarters, 5)}


def main(
    rows: Annotated[Path, typer.Option(help="Where finished cells are kept; the page is written beside it.")],
    rounds: Annotated[int, typer.Option(help="Rounds to time, the first two of which are dropped.")] = 12,
    state_dir: Annotated[Path, typer.Option(help="For checkpoints: the disk that is measured.")] = STATE_DIR,
) -> None:
    """Measure what has no row yet, then write the page."""
    common = {"size": 96, "slices": 64}
    cells: list[Cell] = [
        *({"method": method, "width": 16, "rounds": rounds, **common} for method in ("fedavg", "iop-fl")),
        *({"method": "none", "width": width, "rounds": 10 * rounds, **common} for width in (4, 16, 32)),
    ]
    found = run("round_cost", cells, Rows(rows), compute, state_dir)
    trained = [
        [r["cell"]["method"], _ms(r, "engine_s"), _ms(r, "plain_s"), f"{r['result']['ratio']:.3f}"]
        for r in found
        if r["cell"]["method"] != "none"
    ]
    empty = [
        [f"U-Net, width {r['cell']['width']}", _ms(r, "engine_s"), _ms(r, "floor_s")]
        for r in found
        if r["cell"]["method"] == "none"
    ]
    sections = [
        f"Four sites of 64 slices of 96x96, U-Net of width 16, batch {BATCH}, one worker, one thread. "
        "Milliseconds per round: median [quartiles]; engine and plain loop alternate, and end with equal "
        "weights.",
        table(["method", "engine", "plain PyTorch", "ratio"], trained),
        "With no training in it: weights to four sites and back, averaged, checkpointed. The floor is one "
        "synchronised write of the server's weights on the same disk.",
        table(["weights", "engine", "floor"], empty),
    ]
    write_page(
        rows.with_suffix(".md"),
        "What a round costs",
        f"python -m benchmarks.round_cost --rows {rows}",
        rows,
        sections,
    )


def _ms(row: Mapping[str, Any], side: str) -> str:
    values = row["result"][side]
    return f"{1e3 * values['median']:.1f} [{1e3 * values['q1']:.1f}, {1e3 * values['q3']:.1f}]"


if __name__ == "__main__":
    typer.run(main)
