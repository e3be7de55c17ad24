"""Throughput of POST /segment over bare onnxruntime and beside other servers, jobs of one and two workers,
and memory over many requests.

Clients post the same scan over kept connections, each again as soon as it is answered, to a real server
process over loopback. The floor is bare onnxruntime in this process: threads that run the same prepared
slices, with as many threads of onnxruntime, and do nothing else. Of runs of 1 and 8 slices the faster count.
Served and bare alternate, so that other load on the machine disturbs both, and the ratio is the median over
the pairs. Clients and server share the cores: what the clients use counts against the server.

Processor time per scan is given too, which other load on the machine disturbs less than the clock.
"""

from __future__ import annotations

import http.client
import io
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from PIL import Image

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.cost.health import HOSPITAL, second_worker, start_job, wait_for
from benchmarks.cost.peers import ask, installed, peer
from benchmarks.cost.serving import TASK, form, post, publish, scan_bytes, server, wake
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.gpu import CPU, device_of
from benchmarks.harness.measuring import processor_seconds
from benchmarks.harness.random_space import publish_random_space
from benchmarks.harness.tables import table
from locum.demo.service_process import free_port, running_service
from model_store.manifest import GRAPH
from model_store.preprocessing import prepare
from model_store.scan import decode
from model_store.store import Store
from service.inference.sessions import BATCH, GraphSession

# Enough that no client of this benchmark is rejected.
_QUEUE = 64
_SAMPLES = 40


@dataclass(frozen=True)
class Scan:
    """A scan, the width of the U-Net that segments it, and the numbers of clients; `slices` 0 is a PNG."""

    slices: int
    size: int
    width: int
    clients: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    compressed: bool = False


@dataclass(frozen=True)
class Profile:
    """Scans by name; pairs of served and bare, and scans in each at least; slots; jobs, and the width of
    their U-Nets; requests while memory is watched; clients where other servers are compared.

    `threads` are onnxruntime's per run, on both sides: as many as the machine has cores, and 1.
    """

    scans: dict[str, Scan]
    pairs: int = 3
    least: int = 16
    slots: int = 4
    threads: tuple[int, ...] = (2, 1)
    jobs: int = 6
    job_width: int = 8
    requests: int = 10_800
    peer_clients: tuple[int, ...] = (1, 16)
    device: str = "cpu"


_FEW = (1, 4)
PROFILES = {
    "smoke": Profile({"PNG": Scan(0, 32, 2, (2,))}, 2, 8, 2, (1,), 2, 2, 1000, (2,)),
    "cpu": Profile(
        {
            "PNG": Scan(0, 256, 16),
            "small PNG": Scan(0, 96, 8),
            "volume": Scan(16, 256, 16, _FEW),
            "volume, gzip": Scan(16, 256, 16, (1,), compressed=True),
        },
    ),
    "gpu": Profile(
        {"PNG": Scan(0, 256, 32), "small PNG": Scan(0, 96, 16), "volume": Scan(128, 256, 32, _FEW)},
        slots=16,
        threads=(1,),
        # Their programs run on the CPU.
        peer_clients=(),
        device="cuda",
    ),
}


class Throughput(CostExperiment[Profile]):
    """How many scans and jobs the service gets through."""

    name = "throughput"
    title = "Throughput"
    question = (
        "How many scans does the service answer over bare onnxruntime, and what does a second worker add?"
    )
    profiles = PROFILES
    by = "what"

    def kinds(self) -> Mapping[str, Kind]:
        """How each kind of cell is measured, and how its rows are shown."""
        return {
            "requests": Kind(requests, _requests_section),
            "peers": Kind(peers, _peers_section),
            "jobs": Kind(jobs, _jobs_section),
            "memory": Kind(memory, _memory_section),
        }

    def measured(self) -> Sequence[Cell]:
        """By scan and number of clients; then the jobs; then memory."""
        profile = self.profile
        shared = {"pairs": profile.pairs, "slots": profile.slots}
        served = [
            {
                "what": "requests",
                "scan": name,
                "slices": scan.slices,
                "size": scan.size,
                "width": scan.width,
                "clients": clients,
                "threads": threads,
                "scans": max(profile.least if scan.slices == 0 else 6, 4 * clients),
                **({"compressed": True} if scan.compressed else {}),
                **shared,
            }
            for name, scan in profile.scans.items()
            for threads in profile.threads
            for clients in scan.clients
            # One thread per run is for many clients.
            if threads == profile.threads[0] or clients == 16
        ]
        beside = [
            {
                "what": "peers",
                "scan": name,
                "size": scan.size,
                "width": scan.width,
                "clients": clients,
                "threads": 1,
                "scans": profile.least * 2,
                **shared,
            }
            for name, scan in profile.scans.items()
            for clients in profile.peer_clients
            if scan.slices == 0
        ]
        adapted = {"jobs": profile.jobs, "preset": "ladder", "width": profile.job_width, "pairs": 1}
        posted = {"requests": profile.requests, "clients": 8, "slots": profile.slots, "size": 32, "width": 2}
        cells = [*served, *beside, {"what": "jobs", **adapted}, {"what": "memory", **posted}]
        return cells


def requests(cell: Cell, work: Path) -> dict[str, Any]:
    """Scans per second, and processor time per scan: served, and by bare onnxruntime."""
    clients, scans, folder = cell["clients"], cell["scans"], work / f"run-{time.time_ns()}"
    kind = "nii.gz" if "compressed" in cell else "nii" if cell["slices"] else "png"
    data = scan_bytes(kind, cell["size"], cell["slices"])
    scan, task = decode(data), TASK.model_copy(update={"size": (cell["size"], cell["size"])})
    publish(folder / "store", cell["width"], scan, task)
    artefact = Store(folder / "store").open("cost")
    digest, graph = artefact.manifest.files[GRAPH].sha256, artefact.read(GRAPH)
    session = GraphSession(digest, graph, threads=cell["threads"], device=device_of(cell))
    slices, body = prepare(scan, task).slices, form(data)
    # As many runs at once as the cores have room for: that saturates them.
    callers = max(1, (os.cpu_count() or 1) // cell["threads"]) if device_of(cell) == CPU else cell["slots"]
    ways = [Bare(session, slices, callers, per_run) for per_run in (1, BATCH)]
    settings = {
        "LOCUM_INFERENCE_SLOTS": str(cell["slots"]),
        "LOCUM_INFERENCE_QUEUE": str(_QUEUE),
        "LOCUM_DEVICE": device_of(cell),
    }
    with server(folder, cell["threads"], settings) as running:
        connections = [http.client.HTTPConnection("127.0.0.1", running.port) for _ in range(clients)]

        def served() -> Phase:
            for connection in connections:
                wake(connection)
            return phase(clients, scans, lambda client: post(connections[client], body), running.pid)

        served()
        # The fastest way is chosen beforehand: the pairs below then measure it as often as the server.
        few = max(1, 16 // len(slices))
        way = max(ways, key=lambda way: max(way.run(few).rate for _ in range(2)))
        pairs = [(served(), way.run(scans)) for _ in range(cell["pairs"])]
    latencies = [seconds for ours, _ in pairs for seconds in ours.seconds]
    return {
        "ratio": _spread([ours.rate / bare.rate for ours, bare in pairs]),
        "processor_ratio": _spread([bare.processor / ours.processor for ours, bare in pairs]),
        "per_s": round(median(ours.rate for ours, _ in pairs), 3),
        "bare_per_s": round(median(bare.rate for _, bare in pairs), 3),
        "processor_ms": round(1e3 * median(ours.processor for ours, _ in pairs), 2),
        "bare_processor_ms": round(1e3 * median(bare.processor for _, bare in pairs), 2),
        "median_s": round(median(latencies), 4),
        "p99_s": round(quantiles(latencies, n=100)[98], 4),
        "bare_callers": way.callers,
        "bare_slices_per_run": len(way.batch),
    }


def peers(cell: Cell, work: Path) -> dict[str, Any]:
    """Scans per second and processor time per scan, by Locum and by every other server that is installed, in
    turn. Raises RuntimeError where one of them answers with another mask than FastAPI does.
    """
    clients, folder = cell["clients"], work / f"run-{time.time_ns()}"
    data, size = scan_bytes("png", cell["size"]), (cell["size"], cell["size"])
    publish(folder / "store", cell["width"], decode(data), TASK.model_copy(update={"size": size}))
    graph, body = folder / GRAPH, form(data)
    graph.write_bytes(Store(folder / "store").open("cost").read(GRAPH))
    settings = {"LOCUM_INFERENCE_SLOTS": str(cell["slots"]), "LOCUM_INFERENCE_QUEUE": str(_QUEUE)}
    with ExitStack() as stack:
        running = stack.enter_context(server(folder, cell["threads"], settings))
        found = {"Locum": (running.port, running.pid)}
        for name in installed():
            found[name] = stack.enter_context(peer(name, graph, cell["threads"], body, folder))
        asks: dict[str, Callable[[int], bytes]] = {}
        for name, (port, _) in found.items():
            connections = [
                stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port)))
                for _ in range(clients)
            ]
            asks[name] = partial(_asked, connections, body)
        masks = [Image.open(io.BytesIO(asks[name](0))).tobytes() for name in asks if name != "Locum"]
        if len(set(masks)) > 1:
            raise RuntimeError(f"expected one mask of {', '.join(asks)}, found several")
        phases: dict[str, list[Phase]] = {name: [] for name in found}
        for _ in range(1 + cell["pairs"]):
            for name, (_, pid) in found.items():
                phases[name].append(phase(clients, cell["scans"], asks[name], pid))
    # The first of each wakes its threads.
    kept = {name: runs[1:] for name, runs in phases.items()}
    ours = kept["Locum"]
    return {
        name: {
            "per_s": round(median(run.rate for run in runs), 2),
            "processor_ms": round(1e3 * median(run.processor for run in runs), 2),
            "ratio": _spread([our.rate / run.rate for our, run in zip(ours, runs, strict=True)]),
            "processor_ratio": _spread(
                [run.processor / our.processor for our, run in zip(ours, runs, strict=True)]
            ),
        }
        for name, runs in kept.items()
    }


def _asked(connections: Sequence[http.client.HTTPConnection], body: bytes, client: int) -> bytes:
    return ask(connections[client], body)


@dataclass(frozen=True)
class Phase:
    """What one side did: scans per second, processor seconds per scan, and the seconds of each call."""

    rate: float
    processor: float
    seconds: list[float]


class Bare:
    """One way to keep onnxruntime busy: `callers` threads that run the same slices again and again."""

    def __init__(
        self, session: GraphSession, slices: NDArray[np.float32], callers: int, per_run: int
    ) -> None:
        self._session = session
        self._slices = len(slices)
        self.callers = callers
        self.batch = np.resize(slices, (per_run, *slices.shape[1:]))

    def run(self, scans: int) -> Phase:
        """As many slices as `scans` scans have, rounded up to runs."""
        runs = -(-scans * self._slices // len(self.batch))
        found = phase(self.callers, runs, lambda _: self._session.run_alone(self.batch))
        scans_per_run = len(self.batch) / self._slices
        return Phase(found.rate * scans_per_run, found.processor / scans_per_run, found.seconds)


def phase(callers: int, calls: int, call: Callable[[int], object], pid: int | None = None) -> Phase:
    """Let `callers` threads make `calls` calls in all.

    The rate is that of all calls from the first start to the last end. Calls may end in groups, so a part of
    that time would not tell it. The processor time is that of this process and of the process `pid`.
    """
    left = iter(range(calls))
    turn = threading.Lock()
    seconds: list[float] = []

    def work(caller: int) -> None:
        while True:
            with turn:
                if next(left, None) is None:
                    return
            began = time.perf_counter()
            call(caller)
            seconds.append(time.perf_counter() - began)

    before, started = _processor_seconds(pid), time.perf_counter()
    with ThreadPoolExecutor(callers) as pool:
        for done in [pool.submit(work, caller) for caller in range(callers)]:
            done.result()
    elapsed = time.perf_counter() - started
    return Phase(calls / elapsed, (_processor_seconds(pid) - before) / calls, seconds)


def jobs(cell: Cell, work: Path) -> dict[str, Any]:
    """Seconds of the same jobs by one worker and by two, each of one thread."""
    store, state = work / f"store-{time.time_ns()}", work / f"state-{time.time_ns()}"
    publish_random_space(Store(store), "jobs", TASK, cell["width"], run="throughput")
    os.environ |= {"LOCUM_THREADS": "1", "LOCUM_DEVICE": device_of(cell)}
    with running_service(store, state, free_port()) as client:
        client.put(f"/hospitals/{HOSPITAL}", json={"name": "Outside"}).raise_for_status()

        def seconds(count: int) -> float:
            began = time.perf_counter()
            wait_for(client, [start_job(client, preset=cell["preset"]) for _ in range(count)], "succeeded")
            return time.perf_counter() - began

        # Each worker imports torch with its first job.
        seconds(1)
        one = [seconds(cell["jobs"]) for _ in range(cell["pairs"])]
        with second_worker(store, state):
            seconds(4)
            two = [seconds(cell["jobs"]) for _ in range(cell["pairs"])]
        one += [seconds(cell["jobs"]) for _ in range(cell["pairs"])]
    return {
        "one_s": round(median(one), 2),
        "two_s": round(median(two), 2),
        "ratio": round(median(one) / median(two), 3),
    }


def memory(cell: Cell, work: Path) -> dict[str, Any]:
    """Resident memory of the server in MB, forty times in so many requests, and its open files."""
    folder, size = work / f"run-{time.time_ns()}", cell["size"]
    data = scan_bytes("png", size)
    publish(folder / "store", cell["width"], decode(data), TASK.model_copy(update={"size": (size, size)}))
    settings = {"LOCUM_INFERENCE_SLOTS": str(cell["slots"]), "LOCUM_DEVICE": device_of(cell)}
    body, megabytes, files = form(data), [], []
    with server(folder, 1, settings) as running:
        process = psutil.Process(running.pid)
        connections = [http.client.HTTPConnection("127.0.0.1", running.port) for _ in range(cell["clients"])]
        for _ in range(_SAMPLES):
            phase(len(connections), cell["requests"] // _SAMPLES, lambda c: post(connections[c], body))
            megabytes.append(round(process.memory_info().rss / 1e6, 1))
            files.append(process.num_fds())
    return {"megabytes": megabytes, "files": files}


def _processor_seconds(pid: int | None) -> float:
    """Of this process, and of another with its children."""
    if pid is None:
        return processor_seconds([psutil.Process()])
    other = psutil.Process(pid)
    return processor_seconds([psutil.Process(), other, *other.children(recursive=True)])


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return {"median": round(middle, 3), "q1": round(low, 3), "q3": round(high, 3)}


def _requests_section(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        cell, found = row["cell"], row["result"]
        lines.append(
            [
                cell["scan"],
                cell["threads"],
                cell["clients"],
                f"{found['per_s']:.2f}",
                _ratio(found["ratio"]),
                f"{found['processor_ms']:.1f}",
                _ratio(found["processor_ratio"]),
                f"{found['median_s']:.3f}",
                f"{found['p99_s'] / found['median_s']:.2f}",
            ]
        )
    scans = {row["cell"]["scan"]: row["cell"] for row in rows}
    return [
        "Served scans per second over those of bare onnxruntime, which runs the same slices with as many "
        "threads per run, as many runs at once as the cores have room for, and 1 or 8 slices per run, "
        "whichever is faster. Median [quartiles] of the pairs; 1 is a service that costs nothing. The ratio "
        "of processor times, of bare onnxruntime over server and clients together, depends less on other "
        "load on the machine.",
        "\n".join(f"- {name}: {_described(cell)}" for name, cell in scans.items()),
        table(
            [
                "scan",
                "threads per run",
                "clients",
                "scans/s",
                "served / bare",
                "processor ms",
                "bare / served, processor",
                "median s",
                "p99 / median",
            ],
            lines,
        ),
        "Asked for: 0.9 for PNG at 16 clients, 0.97 for volumes, and a p99 within 3 times the median.",
    ]


def _described(cell: Cell) -> str:
    slices = f"{cell['slices']}x" if cell["slices"] else ""
    return f"{slices}{cell['size']}x{cell['size']}, U-Net of width {cell['width']}, {cell['slots']} slots"


def _peers_section(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        cell = row["cell"]
        for name, found in row["result"].items():
            own = name == "Locum"
            lines.append(
                [
                    cell["scan"],
                    cell["clients"],
                    name,
                    f"{found['per_s']:.1f}",
                    "" if own else _ratio(found["ratio"]),
                    f"{found['processor_ms']:.1f}",
                    "" if own else _ratio(found["processor_ratio"]),
                ]
            )
    return [
        "## Beside other servers",
        "The same graph with one thread a run, in turn. The others decode the PNG, run the network and "
        "encode the mask ([their programs](../../benchmarks/cost/peers)): they check no artefact, guard "
        "nothing and write no audit row. FastAPI is one process, LitServe has a worker per core, BentoML its "
        "default. Processor time is that of server, workers and clients. Ratios are of Locum's scans over "
        "theirs, and of their processor time over Locum's: above 1 Locum is faster.",
        table(
            [
                "scan",
                "clients",
                "server",
                "scans/s",
                "Locum / server",
                "processor ms",
                "server / Locum, processor",
            ],
            lines,
        ),
    ]


def _jobs_section(rows: Sequence[Row]) -> list[str]:
    return [
        "## Jobs",
        *(
            f"{row['cell']['jobs']} adaptations took {row['result']['one_s']:.1f} s by one worker and "
            f"{row['result']['two_s']:.1f} s by two, each with one thread: {row['result']['ratio']:.2f} "
            "times as many jobs in the same time. One worker was timed before and after the second one ran."
            for row in rows
        ),
    ]


def _memory_section(rows: Sequence[Row]) -> list[str]:
    body = []
    for row in rows:
        found, every = row["result"]["megabytes"], row["cell"]["requests"] // _SAMPLES
        for index in (0, _SAMPLES // 10, _SAMPLES // 4, _SAMPLES // 2, _SAMPLES - 1):
            body.append([every * (index + 1), f"{found[index]:.0f}", row["result"]["files"][index]])
    return [
        "## Memory",
        "Resident memory of the server after so many answers, and its open files.",
        table(["answers", "MB", "open files"], body),
    ]


def _ratio(found: Mapping[str, float]) -> str:
    return f"{found['median']:.2f} [{found['q1']:.2f}, {found['q3']:.2f}]"
