"""Worker processes and the state they keep."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.training.toy_federation import Toy, site
from tests.helpers.waiting import wait_for
from training.engine.client import RunEnvironment
from training.engine.egress import SiteSpec
from training.engine.pool import WorkerPool
from training.engine.tensorfile import read_tensors, write_tensors
from training.engine.worker import Task, Worker


def test_worker_continues_before_its_answer_is_consumed(tmp_path: Path) -> None:
    sites = [SiteSpec(name, partial(Path.touch, tmp_path / name)) for name in "AB"]
    with WorkerPool(Toy(), sites, RunEnvironment(0), tmp_path, workers=1) as pool:
        answers = pool.run([Task("A"), Task("B")])
        assert next(answers).site == "A"
        # The second answer has not been requested yet.
        wait_for((tmp_path / "B").exists)
        assert next(answers).site == "B"


def test_algorithm_with_many_tensors_reaches_its_worker(tmp_path: Path) -> None:
    algorithm = Toy()
    algorithm.filters = [torch.ones(1) for _ in range(300)]  # type: ignore[attr-defined]
    with WorkerPool(algorithm, [SiteSpec("A", tuple)], RunEnvironment(0), tmp_path, workers=1) as pool:
        assert [answer.site for answer in pool.run([Task("A")])] == ["A"]


@pytest.mark.skipif(sys.platform != "linux", reason="started empty elsewhere")
def test_processes_of_a_run_start_with_their_imports_made() -> None:
    # A module that cannot be imported there is ignored. The program starts a server of its own,
    # and asks by `eval`, since a function would import its own module.
    script = """
from training.processes import PRELOADED, process_context
with process_context().Pool(1) as pool:
    print(set(PRELOADED) - set(pool.apply(eval, ["list(__import__('sys').modules)"])))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_worker_reads_a_download_once_per_round(tmp_path: Path) -> None:
    worker = Worker(Toy(), [site("A", 1.0), site("B", 2.0)], RunEnvironment(0), tmp_path)
    download = tmp_path / "down"

    def upload(name: str, round_: int) -> list[float]:
        answer = worker.answer(Task(name, 0, round_, {"weights": download}, None, upload=tmp_path / "up"))
        values: list[float] = read_tensors(answer.files["weights"])[0]["w"].tolist()
        return values

    write_tensors(download, {"w": torch.zeros(2), "count": torch.tensor(1)})
    assert upload("A", 0) == [1.0, 1.0]
    # The next round overwrites the download like this.
    write_tensors(download, {"w": torch.ones(2), "count": torch.tensor(1)})
    assert upload("B", 0) == [2.0, 2.0]
    assert upload("A", 1) == [2.0, 2.0]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_keep_freed_memory_avoids_new_page_faults() -> None:
    script = """
import ctypes, resource
from training.engine.worker import keep_freed_memory
keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
for round_ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(2**26)
    ctypes.memset(block, 1, 2**26)
    library.free(block)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, *later = map(int, done.stdout.split())
    # 64 MiB are 16384 pages, or fewer large ones; after the first round they are still mapped.
    assert max(later) < first / 4
