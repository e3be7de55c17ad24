"""A benchmark is a list of cells; a finished cell is one JSON row in a file, and is never computed again.

    rows = Rows(Path("docs/results/inside.cpu.jsonl"))
    run("inside.cpu", cells, rows, compute)

`compute(cell, work)` gets the cell's parameters and a folder of its own, in which it may keep checkpoints: a
run that is killed starts over with the first unfinished cell, and finds that cell's folder as it was left.
Several runs may share one rows file: each takes cells that no other is working on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

JSON: TypeAlias = Any
Cell: TypeAlias = Mapping[str, JSON]
Compute: TypeAlias = Callable[[Cell, Path], Mapping[str, JSON]]

STATE_DIR = Path(".locum/benchmarks")


def key(cell: Cell) -> str:
    """The cell's identity: its parameters, in whatever order they were given."""
    return json.dumps(cell, sort_keys=True, allow_nan=False)


class Rows:
    """A file of JSON lines, `{"cell": ..., "result": ..., "seconds": ..., "made_with": ...}`.

    Appending is atomic and durable. A line that a crash of the machine tore is ignored, then overwritten.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, JSON]]:
        """All finished rows, in the order in which they finished."""
        if not self.path.exists():
            return []
        whole, _, _torn = self.path.read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.splitlines() if line.strip()]

    def of(self, cells: Sequence[Cell]) -> list[dict[str, JSON]]:
        """The finished rows of these cells, in the order in which they finished."""
        wanted = {key(cell) for cell in cells}
        return [row for row in self.read() if key(row["cell"]) in wanted]

    def append(self, row: Mapping[str, JSON]) -> None:
        """Add one row; when this returns it is on the disk. A cell that has a row keeps that one."""
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
        """Keys of the cells that have a row."""
        return {key(row["cell"]) for row in self.read()}


def run(
    name: str,
    cells: Sequence[Cell],
    rows: Rows,
    compute: Compute,
    state_dir: Path = STATE_DIR,
    after_each: Callable[[], None] | None = None,
    ready: Callable[[Cell], bool] | None = None,
) -> list[dict[str, JSON]]:
    """Compute the cells that have no row yet, one after the other; return the rows of all of `cells`.

    A cell that another run holds is left to it, so that fewer rows than cells may come back. An exception
    of `compute` ends the run; what was finished stays, and so does the cell's folder. `after_each` is called
    after every cell that was computed: a place to write the page, so that it never lags behind the rows.
    A cell that is not `ready` when its turn comes is left for another time.
    """
    for number, cell in enumerate(cells, start=1):
        label = f"{name} {number}/{len(cells)} {describe(cell)}"
        if key(cell) in rows.finished():
            continue
        if ready is not None and not ready(cell):
            print(f"{label}: not ready", flush=True)
            continue
        work = state_dir / name / hashlib.sha256(key(cell).encode()).hexdigest()[:16]
        with _claimed(work) as mine:
            # Asked again, since another run may have finished the cell while this one waited for the disk.
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
    wanted = {key(cell): position for position, cell in enumerate(cells)}
    found = {key(row["cell"]): row for row in rows.of(cells)}
    return [found[k] for k in sorted(found, key=wanted.__getitem__)]


def describe(cell: Cell) -> str:
    """The cell for a person: `seed=0 fold=1`; nested parameters are left to the row."""
    return " ".join(f"{name}={value}" for name, value in cell.items() if not isinstance(value, Mapping))


def made_with() -> dict[str, str]:
    """What a figure depends on besides the cell."""
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **{package: version(package) for package in ("locum", "torch", "numpy")},
    }


@contextmanager
def _claimed(work: Path) -> Iterator[bool]:
    """Whether this process, and no other, holds the folder. The kernel lets go of a killed process's lock."""
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
