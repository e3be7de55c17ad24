"""Joined runs: the same bits as alone, in fewer runs, and no other call's error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from personalization.export import to_onnx
from personalization.networks import build
from service.inference.joined import JoinedRuns
from service.inference.sessions import BATCH, GraphSession, Outputs
from tests.helpers.waiting import wait_for

Slices = NDArray[np.float32]


class Graph:
    """Doubles its slices; runs wait while `held`. `sizes` are those of its runs, in order."""

    def __init__(self, run: Callable[[Slices], Slices] = lambda slices: slices * 2) -> None:
        self._double = run
        self._free = threading.Event()
        self._free.set()
        self.sizes: list[int] = []
        self.runs = JoinedRuns("sha256:graph", self._run, at_once=1, most=lambda s: 8 if s[-1] < 512 else 1)

    def _run(self, slices: Slices) -> list[NDArray[Any]]:
        self.sizes.append(len(slices))
        assert self._free.wait(60)
        return [self._double(slices), np.arange(len(slices))[:, None] * 0]

    def together(self, parts: list[Slices]) -> list[Future[Any]]:
        """Call with `parts` in this order while another call runs; that one ends when all others wait."""
        self._free.clear()
        pool = ThreadPoolExecutor(len(parts) + 1)
        began = len(self.sizes)
        calls = [pool.submit(self.runs, images(1))]
        wait_for(lambda: len(self.sizes) > began)
        for count, part in enumerate(parts, start=1):
            calls.append(pool.submit(self.runs, part))
            wait_for(lambda count=count: self.runs.waiting == count)
        self._free.set()
        pool.shutdown()
        del self.sizes[began]
        return calls[1:]


def images(count: int, seed: int = 0, size: int = 16) -> Slices:
    return np.random.default_rng(seed).random((count, 1, size, size), dtype=np.float32)


def test_call_of_an_idle_graph_runs_alone() -> None:
    graph = Graph()
    for seed in range(3):
        np.testing.assert_array_equal(graph.runs(images(2, seed))[0], images(2, seed) * 2)
    assert graph.sizes == [2, 2, 2]


def test_waiting_calls_share_a_run_once_its_composition_was_compared() -> None:
    graph = Graph()
    parts = [images(1, 1), images(3, 2), images(2, 3)]
    for expected in ([1, 3, 2, 6], [6]):
        graph.sizes.clear()
        for part, call in zip(parts, graph.together(parts), strict=True):
            np.testing.assert_array_equal(call.result()[0], part * 2)
        assert graph.sizes == expected
    graph.sizes.clear()
    graph.together(parts[::-1])
    assert graph.sizes == [2, 3, 1, 6], "another order is another composition"


def test_joined_run_is_bounded_and_keeps_the_order() -> None:
    graph = Graph()
    graph.together([images(5, 1), images(4, 2), images(4, 3), images(8, 4)])
    # 5 alone, since 4 more would be too many; then 4 and 4, compared with themselves alone; then 8.
    assert graph.sizes == [5, 4, 4, 8, 8]


def test_slices_of_another_size_and_large_ones_are_not_joined() -> None:
    graph = Graph()
    graph.together([images(1, 1), images(1, 2, size=8), images(1, 3, size=512), images(1, 4, size=512)])
    assert graph.sizes == [1, 1, 1, 1]


def test_graph_of_which_a_joined_run_gives_other_bits_is_never_joined_again() -> None:
    # As of a network that normalises over its whole batch.
    graph = Graph(lambda slices: slices - slices.mean(dtype=np.float32))
    parts = [images(1, 1), images(1, 2)]
    for expected in ([1, 1, 2], [1, 1]):
        graph.sizes.clear()
        for part, call in zip(parts, graph.together(parts), strict=True):
            np.testing.assert_array_equal(call.result()[0], part - part.mean(dtype=np.float32))
        assert graph.sizes == expected


@pytest.mark.parametrize("known", [False, True])
def test_error_reaches_only_the_call_that_has_it(known: bool) -> None:
    def run(slices: Slices) -> Slices:
        if (slices < 0).any():
            raise ValueError("negative")
        return slices * 2

    graph = Graph(run)
    good = [images(1, 1), images(1, 2), images(1, 3)]
    if known:
        graph.together(good)
    first, second, third = graph.together([good[0], -good[1], good[2]])
    np.testing.assert_array_equal(first.result()[0], good[0] * 2)
    np.testing.assert_array_equal(third.result()[0], good[2] * 2)
    with pytest.raises(ValueError, match="negative"):
        second.result()
    np.testing.assert_array_equal(graph.runs(good[1])[0], good[1] * 2)


def test_joined_run_that_cannot_be_cut_is_an_error_of_every_call_in_it() -> None:
    graph = Graph(lambda slices: slices * 2 if len(slices) < 3 else np.float32(1))  # type: ignore[arg-type,return-value]
    calls = graph.together([images(1, 1), images(1, 2), images(1, 3)])
    for call in calls:
        with pytest.raises(IndexError):
            call.result(60)
    # The turn went on.
    np.testing.assert_array_equal(graph.runs(images(1, 4))[0], images(1, 4) * 2)


def test_runs_at_once_are_bounded() -> None:
    running, most, lock = [0], [0], threading.Lock()

    def run(slices: Slices) -> list[NDArray[Any]]:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        found = [slices * 2]
        with lock:
            running[0] -= 1
        return found

    runs = JoinedRuns("sha256:graph", run, at_once=2, most=lambda _: 8)
    with ThreadPoolExecutor(12) as pool:
        for seed, found in enumerate(pool.map(lambda seed: runs(images(2, seed)), range(200))):
            np.testing.assert_array_equal(found[0], images(2, seed) * 2)
    assert most[0] <= 2


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("unet", {"in_channels": 1, "classes": 3, "width": 4}),
        ("resnet18", {"in_channels": 1, "classes": 3, "width": 4}),
        ("vit", {"in_channels": 1, "classes": 3, "size": (32, 32), "patch": 8, "width": 24, "depth": 2}),
    ],
)
def test_graph_gives_many_threads_the_bits_of_a_thread_alone(name: str, arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    session = GraphSession("d", to_onnx(build(name, **arguments), 1, (32, 32)), threads=1, device="cpu")
    parts = [images(1 + seed % 3, seed, size=32) for seed in range(60)]
    alone = [session.run_alone(part) for part in parts]
    for _ in range(3):
        with ThreadPoolExecutor(BATCH) as pool:
            for found, expected in zip(pool.map(session.run, parts), alone, strict=True):
                assert bits(found) == bits(expected)


def test_larger_slices_are_fewer_in_a_run(threshold_graph: Callable[..., bytes]) -> None:
    session = GraphSession("d", threshold_graph(), device="cpu")
    assert [session.slices_per_run((1, side, side)) for side in (64, 128, 192, 256, 512)] == [8, 8, 3, 2, 1]


def bits(outputs: Outputs) -> list[bytes | None]:
    return [None if array is None else array.tobytes() for array in vars(outputs).values()]
