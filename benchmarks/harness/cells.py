"""Resumable benchmarks: a list of cells, each computed once and kept as one JSON row of a file.

    rows = Rows(Path("docs/results/dose.cpu.jsonl"))
    run("dose.cpu", cells, rows, compute)

`compute(cell, work)` gets the cell's parameters and a folder of the cell's own for checkpoints. A run that
was killed continues with the first unfinished cell and finds that cell's folder unchanged. Several runs may
share one rows file: each takes cells that no other run is working on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

JSON: TypeAlias = Any
Cell: TypeAlias = Mapping[str, JSON]
Row: TypeAlias = Mapping[str, JSON]
Compute: TypeAlias = Callable[[Cell, Path], Mapping[str, JSON]]

STATE_DIR = Path(".locum/benchmarks")


def key(cell: Cell) -> str:
    """The cell's identity: its parameters as JSON, independent of their order."""
    return json.dumps(cell, sort_keys=True, allow_nan=False)


class Rows:
    """A file of JSON lines, `{"cell": ..., "result": ..., "seconds": ..., "made_with": ...}`.

    Appending is atomic and durable. A last line that a crash left incomplete is ignored, then overwritten.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Row]:
        """All finished rows, in the order in which they finished."""
        if not self.path.exists():
            return []
        whole, _, _torn = self.path.read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.splitlines() if line.strip()]

    def append(self, row: Row) -> None:
        """Append one row; on return it is on disk. The first row of a cell stays, a second one is dropped."""
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if key(row["cell"]) in self.finished():
                return
            end = self.path.read_bytes().rfind(b"\n") + 1
            os.ftruncate(descriptor, end)
            os.pwrite(descriptor, line, end)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def finished(self) -> set[str]:
        """The keys of the cells that have a row."""
        return {key(row["cell"]) for row in self.read()}


def run(
    name: str,
    cells: Sequence[Cell],
    rows: Rows,
    compute: Compute,
    state_dir: Path = STATE_DIR,
    after_each: Callable[[], None] | None = None,
) -> list[Row]:
    """Compute the cells that have no row yet, one after the other; return the rows of all of `cells`.

    A cell that another run has claimed is skipped, so fewer rows than cells may be returned. An exception of
    `compute` ends the run; finished rows and the cell's folder stay. `after_each` is called after every
    computed cell, for example to update the page.
    """
    for number, cell in enumerate(cells, start=1):
        label = f"{name} {number}/{len(cells)} {describe(cell)}"
        if key(cell) in rows.finished():
            continue
        work = state_dir / name / hashlib.sha256(key(cell).encode()).hexdigest()[:16]
        with _claimed(work) as mine:
            # Checked again: another run may have finished the cell between the first check and the claim.
            if not mine or key(cell) in rows.finished():
                print(f"{label}: taken by another run", flush=True)
                continue
            print(f"{label}: started", flush=True)
            began = time.perf_counter()
            result = compute(cell, work)
            seconds = round(time.perf_counter() - began, 3)
            rows.append({"cell": cell, "result": result, "seconds": seconds, "made_with": made_with()})
            shutil.rmtree(work)
            print(f"{label}: finished in {seconds:.0f} s", flush=True)
            if after_each is not None:
                after_each()
    return in_order(rows.read(), cells)


def in_order(rows: Sequence[Row], cells: Sequence[Cell]) -> list[Row]:
    """The rows of these cells, in the order of the cells."""
    by_cell = {key(row["cell"]): row for row in rows}
    return [by_cell[key(cell)] for cell in cells if key(cell) in by_cell]


def describe(cell: Cell) -> str:
    """The cell in one line for the terminal, `seed=0 fold=1`, without nested parameters."""
    return " ".join(f"{name}={value}" for name, value in cell.items() if not isinstance(value, Mapping))


def made_with() -> dict[str, str]:
    """Versions and machine: what a figure depends on besides the cell."""
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "processor": _processor(),
        "commit": _commit(),
        **{package: version(package) for package in ("locum", "torch", "numpy")},
    }


def _processor() -> str:
    """The processor's name, as Linux has it; else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the code, with `+` where files differ from it; "unknown" outside of a repository."""
    where = Path(__file__).parent
    command = ["git", "-C", str(where), "describe", "--always", "--abbrev=8", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextmanager
def _claimed(work: Path) -> Iterator[bool]:
    """Lock the folder; False when another process holds it. The kernel releases a killed process's lock."""
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
