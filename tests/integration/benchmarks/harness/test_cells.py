from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.harness.cells import Cell, Rows, key, run

ROOT = Path(__file__).parents[4]
# Cells count the lines they have written to their own folder, one per step, and kill their process half way.
BENCHMARK = """
import os, signal, sys
from pathlib import Path
from benchmarks.harness.cells import Rows, run

def compute(cell, work):
    steps = work / "steps"
    done = len(steps.read_text().split()) if steps.exists() else 0
    began_at = done
    while done < 4:
        with steps.open("a") as stream:
            stream.write("x\\n")
        done += 1
        if done == 2 and cell["n"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return {"steps": done, "began_at": began_at}

rows = run("toy", [{"n": n} for n in range(3)], Rows(Path(sys.argv[1])), compute, Path(sys.argv[2]))
assert [row["cell"]["n"] for row in rows] == [0, 1, 2]
"""


def _square(cell: Cell, work: Path) -> dict[str, int]:
    (work / "scratch").write_text("x")
    return {"square": cell["n"] ** 2}


def test_killed_run_resumes_with_the_unfinished_cell_and_its_folder(tmp_path: Path) -> None:
    path, state = tmp_path / "results" / "toy.jsonl", tmp_path / "state"
    command = [sys.executable, "-c", BENCHMARK, str(path), str(state)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
    assert [row["cell"] for row in Rows(path).read()] == [{"n": 0}]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    results = [row["result"] for row in Rows(path).read()]
    assert [result["began_at"] for result in results] == [0, 2, 0]
    assert all(result["steps"] == 4 for result in results)
    assert not [p for p in state.rglob("*") if p.is_file() and p.suffix != ".lock"]


def test_finished_cells_are_never_computed_again(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    run("squares", [{"n": 2, "tau": 0.9}], rows, _square, tmp_path)

    def refuse(cell: Cell, work: Path) -> dict[str, int]:
        raise AssertionError(f"computed again: {cell}")

    # The same parameters in another order are the same cell.
    (row,) = run("squares", [{"tau": 0.9, "n": 2}], rows, refuse, tmp_path)
    assert row["result"] == {"square": 4}
    assert row["made_with"]["torch"]


def test_rows_come_back_in_the_order_of_the_cells_asked_for(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    run("squares", [{"n": n} for n in (5, 3, 4)], rows, _square, tmp_path)
    calls: list[int] = []
    asked = [{"n": 3}, {"n": 7}, {"n": 5}]
    found = run("squares", asked, rows, _square, tmp_path, after_each=lambda: calls.append(len(rows.read())))
    assert [row["result"]["square"] for row in found] == [9, 49, 25]
    assert calls == [4]


def test_torn_last_line_is_ignored_and_replaced(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.append({"cell": {"n": 1}, "result": 1})
    with rows.path.open("ab") as stream:
        stream.write(b'{"cell": {"n": 2}, "resu')
    assert len(rows.read()) == 1
    rows.append({"cell": {"n": 3}, "result": 3})
    assert [json.loads(line)["cell"]["n"] for line in rows.path.read_text().splitlines()] == [1, 3]


def test_failed_cell_keeps_what_was_finished_and_its_own_folder(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")

    def fails_at_two(cell: Cell, work: Path) -> dict[str, int]:
        if cell["n"] == 2:
            (work / "checkpoint").write_text("half")
            raise RuntimeError("no power")
        return _square(cell, work)

    cells = [{"n": n} for n in (1, 2, 3)]
    with pytest.raises(RuntimeError, match="no power"):
        run("squares", cells, rows, fails_at_two, tmp_path / "state")
    assert rows.finished() == {key({"n": 1})}
    (checkpoint,) = (tmp_path / "state").rglob("checkpoint")
    assert checkpoint.read_text() == "half"


def test_a_cell_keeps_its_first_row(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    for result in (1, 2):
        rows.append({"cell": {"n": 1}, "result": result})
    assert [row["result"] for row in rows.read()] == [1]


def _append(path: Path, first: int) -> None:
    for n in range(first, first + 50):
        Rows(path).append({"cell": {"n": n}, "result": "x" * n})


def test_two_processes_append_without_losing_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    workers = [context.Process(target=_append, args=(path, first)) for first in (0, 50)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert {row["cell"]["n"] for row in Rows(path).read()} == set(range(100))


def test_a_cell_that_another_run_holds_is_left_to_it(tmp_path: Path) -> None:
    holder = """
import sys, time
from pathlib import Path
from benchmarks.harness.cells import Rows, run

def compute(cell, work):
    Path(sys.argv[2], "held").touch()
    time.sleep(600)

run("squares", [{"n": 1}], Rows(Path(sys.argv[1])), compute, Path(sys.argv[2]))
"""
    path = tmp_path / "rows.jsonl"
    process = subprocess.Popen([sys.executable, "-c", holder, str(path), str(tmp_path)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "held").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = run("squares", [{"n": 1}, {"n": 2}], Rows(path), _square, tmp_path)
        assert [row["cell"]["n"] for row in found] == [2]
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert len(run("squares", [{"n": 1}, {"n": 2}], Rows(path), _square, tmp_path)) == 2
