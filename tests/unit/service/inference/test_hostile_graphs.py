"""Hostile graphs: no file is read, and no run is without an end or takes all memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper

from model_store.errors import ArtefactDamaged, GraphRefused
from service.errors import RunTooLong
from service.inference import loading
from service.inference.joined import JoinedRuns
from service.inference.limits import GraphLimits
from service.inference.loading import GraphPart
from service.inference.sessions import GraphSession, SessionCache
from service.settings import Settings
from tests.helpers.model_store.graphs import SIDE, endless_graph, network_of, spying_graph, to_bytes

IMAGES = np.zeros((2, 1, SIDE, SIDE), np.float32)
SECRET = bytes(range(128))


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The location of a file in the state folder below the working directory."""
    (tmp_path / ".locum" / "state").mkdir(parents=True)
    (tmp_path / ".locum" / "state" / "locum.db").write_bytes(SECRET)
    monkeypatch.chdir(tmp_path)
    return ".locum/state/locum.db"


def test_graph_that_names_a_file_is_not_loaded(beside: str) -> None:
    with pytest.raises(GraphRefused, match=r"graph sha256:spy: .*another file, '\.locum/state/locum.db'"):
        GraphSession("sha256:spy", spying_graph(beside), device="cpu")
    cache = SessionCache(2, device="cpu")
    with pytest.raises(GraphRefused):
        cache.get("sha256:spy", lambda: spying_graph(beside))
    assert len(cache) == 0


def test_onnxruntime_reads_no_file_even_of_an_unchecked_graph(beside: str) -> None:
    # What the graph does without the session's empty folder: the file's bits are its mask.
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    naive = onnxruntime.InferenceSession(spying_graph(beside), options, providers=["CPUExecutionProvider"])
    (mask,) = naive.run(["probabilities"], {"image": IMAGES[:1]})
    assert np.packbits(mask.argmax(axis=1)).tobytes() == SECRET
    with pytest.raises(Exception, match="External data path"):
        loading._load(GraphPart(spying_graph(beside), {}), 1, ["CPUExecutionProvider"], 60.0)


def test_bytes_that_are_onnxruntime_s_own_format_too_are_loaded_as_onnx(
    threshold_graph: Callable[..., bytes],
) -> None:
    model = onnx.load_from_string(threshold_graph())
    # producer_name comes first when its bytes do: `ORTM` at byte 4 marks onnxruntime's format.
    rest = model.SerializeToString()
    content = b"\x12\x0600ORTM" + rest
    assert content[4:8] == b"ORTM"
    assert GraphSession("d", content, device="cpu").run(IMAGES).probabilities.shape == (2, 2, SIDE, SIDE)


def test_worker_loads_a_graph_by_the_same_rules(beside: str, tmp_path: Path) -> None:
    from service.worker.pictures import load

    settings = Settings(state_dir=tmp_path, device="cpu", threads=1, seconds_per_slice=0.25)
    with pytest.raises(GraphRefused, match="another file"):
        load(spying_graph(beside), settings)
    with pytest.raises(GraphRefused, match="found Loop"):
        load(endless_graph(), settings)
    loaded = load(endless_graph(), settings.model_copy(update={"graph_operators": ("Loop",)}))
    with pytest.raises(RunTooLong):
        loaded.run(IMAGES)


def test_run_without_an_end_is_ended_and_the_next_one_works(threshold_graph: Callable[..., bytes]) -> None:
    limits = GraphLimits(operators=("Loop",), seconds_per_slice=0.25)
    endless = GraphSession("sha256:loop", endless_graph(), threads=1, device="cpu", limits=limits)
    for _ in range(2):
        with pytest.raises(
            RunTooLong, match=r"sha256:loop: a run of 2 slices took longer than 0.25 s for each"
        ):
            endless.run(IMAGES)
    with pytest.raises(RunTooLong):
        endless.run_alone(IMAGES)
    sound = GraphSession("d", threshold_graph(), threads=1, device="cpu", limits=limits)
    assert sound.run(IMAGES).probabilities.shape == (2, 2, SIDE, SIDE)


def test_load_that_takes_too_long_is_ended_and_the_next_one_works(
    threshold_graph: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = GraphLimits(seconds_per_slice=0.001)
    # Its optimisation alone takes seconds.
    names = ["image", *(f"x{index}" for index in range(15_000)), "shown"]
    nodes = [
        helper.make_node("Sigmoid" if index % 2 else "Relu", [before], [after])
        for index, (before, after) in enumerate(pairwise(names))
    ]
    slow = to_bytes(network_of(nodes, []))
    cache = SessionCache(2, threads=1, device="cpu", limits=limits)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_LEAST_LOAD_SECONDS", 0.01)
        for _ in range(2):
            with pytest.raises(RunTooLong, match=r"sha256:slow: it was not loaded in 0\.01 s"):
                cache.get("sha256:slow", lambda: slow)
    assert len(cache) == 0
    assert cache.get("d", threshold_graph).provider == "CPUExecutionProvider"


def test_joined_calls_of_a_run_that_was_ended_all_fail_with_it() -> None:
    begun, go_on = threading.Event(), threading.Event()
    runs: list[int] = []

    def run(slices: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        runs.append(len(slices))
        begun.set()
        go_on.wait()
        if len(runs) > 1:
            raise RunTooLong("too long")
        return [slices]

    joined = JoinedRuns("d", run, at_once=1, most=lambda _: 8)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(joined, IMAGES)
        begun.wait()
        others = [pool.submit(joined, IMAGES[:1]) for _ in range(3)]
        while joined.waiting < 3:
            pass
        go_on.set()
        assert len(first.result()) == 1
        assert {type(other.exception()) for other in others} == {RunTooLong}
    # The first of the others is run alone, and no other after it.
    assert runs == [2, 1]


MEMORY = """
import numpy as np
from service.errors import RunTooLarge
from service.inference.limits import GraphLimits
from service.inference.sessions import GraphSession
from tests.helpers.model_store.graphs import SIDE, growing_graph, unfolding_graph

MB = 10**6
images, limits = np.zeros((1, 1, SIDE, SIDE), np.float32), GraphLimits(memory_bytes=600 * MB)

def session(values):
    return GraphSession("sha256:big", growing_graph(values), threads=1, device="cpu", limits=limits)

# None alone is too large. Without giving back what the first two left unused, there is no room for the third.
for values in (50 * MB, 80 * MB, 120 * MB):
    assert session(values).run(images).probabilities.shape == (1, 1, SIDE, SIDE)
try:
    session(2000 * MB).run(images)
except RunTooLarge as error:
    print(error)
assert session(120 * MB).run(images).probabilities.shape == (1, 1, SIDE, SIDE)
# What is known without the image is not computed while the graph is loaded, beyond the limit.
known = GraphSession("sha256:known", unfolding_graph(200 * MB), threads=1, device="cpu", limits=limits)
try:
    known.run(images)
except RunTooLarge as error:
    print(error)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.process
def test_run_that_needs_more_memory_than_networks_may_use_is_refused_before_it_is_allocated() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    said, known, highest = *done.stdout.splitlines()[:2], int(done.stdout.split()[-2])
    assert "sha256:big: a run of 1 slices needs more than the 600000000 bytes" in said
    assert "sha256:known: a run of 1 slices needs more than the 600000000 bytes" in known
    # The last one asks for eight gigabytes.
    assert highest < 1_500_000


def test_default_memory_is_a_part_of_the_machine_s() -> None:
    assert 0 < GraphLimits().memory < 2**50
    assert GraphLimits(memory_bytes=7).memory == 7


def test_damaged_network_is_still_reported_as_damaged() -> None:
    with pytest.raises(ArtefactDamaged, match="onnxruntime cannot load it"):
        GraphSession("d", b"", device="cpu")
