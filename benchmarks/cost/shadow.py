"""What a shadow costs the answers that are served: two hospitals of one server take turns, one with a shadow.

The second version runs in a worker, which is another process and not running here: its cost is a run of its
network per scan, wherever the worker is. What stays with the server is that the scan is kept for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.cost.serving import ServerProcess, form, post, publish, scan_bytes, server
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.tables import table
from model_store.scan import decode

# So many scans of a shadow may wait for a worker; there is none here, and what waits is cancelled.
_TURN = 15
_SETTLE_SECONDS = 0.5
_PERSON = {"actor": "benchmark", "reason": "measured"}


@dataclass(frozen=True)
class Profile:
    """Turns of 15 answers each; one thread of onnxruntime."""

    turns: int = 12
    width: int = 16
    scans: tuple[str, ...] = ("png", "nii")


PROFILES = {"smoke": Profile(1, 2, ("png",)), "cpu": Profile()}


class ShadowCost(CostExperiment[Profile]):
    """The cost of a second version that answers unseen."""

    name = "shadow_cost"
    title = "What a shadow costs the answers that are served"
    question = "What does a version that answers every scan unseen cost the answers that are served?"
    profiles = PROFILES

    def kinds(self) -> Mapping[str, Kind]:
        """One kind."""
        return {"": Kind(_measure, _sections)}

    def measured(self) -> Sequence[Cell]:
        """A cell per kind of scan."""
        settings = self.profile
        return [
            {"scan": kind, "width": settings.width, "turns": settings.turns if kind == "png" else 3}
            for kind in settings.scans
        ]


def _measure(cell: Cell, work: Path) -> dict[str, Any]:
    data = scan_bytes(cell["scan"], slices=16)
    for seed in range(2):
        publish(work / "store", cell["width"], decode(data), seed=seed)
    with server(work, 1, {"LOCUM_MAX_WAITING_JOBS": "1000"}) as found:
        for hospital in ("plain", "shadowed"):
            _ask(found, "PUT", f"/hospitals/{hospital}", {"name": hospital})
            decision = {"version": 1, **_PERSON}
            _ask(found, "PUT", f"/hospitals/{hospital}/serving/cost", decision, {"If-None-Match": "*"})
        shadow = {"version": 2, "every": 1, **_PERSON}
        _ask(found, "PUT", "/hospitals/shadowed/serving/cost/shadow", shadow)
        process = psutil.Process(found.pid)
        seconds: dict[str, list[float]] = {"plain": [], "shadowed": []}
        spent = dict.fromkeys(seconds, 0.0)
        bodies: set[bytes] = set()
        # The first turn loads the network, and the process learns of the shadow.
        for turn in range(cell["turns"] + 1):
            for hospital in seconds:
                before = sum(process.cpu_times()[:2])
                for _ in range(_TURN):
                    began = time.perf_counter()
                    content, _ = post(found.connection, form(data, hospital=hospital))
                    if turn:
                        seconds[hospital].append(time.perf_counter() - began)
                    bodies.add(content)
                time.sleep(_SETTLE_SECONDS)
                if turn:
                    spent[hospital] += sum(process.cpu_times()[:2]) - before
            kept = _cancel(found)
    number = cell["turns"] * _TURN
    return {
        "same": len(bodies) == 1,
        "kept": kept,
        **{f"{name} ms": round(1e3 * median(values), 3) for name, values in seconds.items()},
        **{f"{name} cpu ms": round(1e3 * value / number, 3) for name, value in spent.items()},
    }


def _cancel(found: ServerProcess) -> int:
    """Cancel the jobs that wait; return how many there were."""
    jobs = _ask(found, "GET", "/jobs?state=queued&limit=1000")["jobs"]
    for job in jobs:
        _ask(found, "DELETE", f"/jobs/{job['id']}")
    return len(jobs)


def _ask(
    found: ServerProcess,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Any:
    sent = {"Content-Type": "application/json", **(headers or {})}
    found.connection.request(method, path, None if body is None else json.dumps(body), sent)
    answer = found.connection.getresponse()
    content = answer.read()
    if answer.status >= 400:
        raise RuntimeError(f"{method} {path}: {answer.status} {content.decode()}")
    return json.loads(content) if content else None


def _sections(rows: Sequence[Row]) -> list[str]:
    lines = [
        [
            str(row["cell"]["scan"]),
            "the same" if row["result"]["same"] else "others",
            f"{row['result']['plain ms']:.1f}",
            f"{row['result']['shadowed ms']:.1f}",
            f"{row['result']['shadowed ms'] / row['result']['plain ms']:.2f}",
            f"{row['result']['plain cpu ms']:.1f}",
            f"{row['result']['shadowed cpu ms']:.1f}",
        ]
        for row in rows
    ]
    header = ("scan", "bytes", "ms without", "ms with", "ratio", "processor ms without", "with")
    return [
        "Every scan is taken; a shadow of one in ten takes a tenth. Median of answers end to end, and the "
        "server's processor time per answer with what follows it. 16 slices of a volume.",
        table(header, lines),
    ]
