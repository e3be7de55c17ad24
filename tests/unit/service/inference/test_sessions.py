"""Sessions and their cache: each graph loaded once, the least recently used forgotten, the right numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from model_store.errors import ArtefactDamaged, GraphRefused
from service.errors import GpuUnavailable
from service.inference import providers
from service.inference.limits import GraphLimits
from service.inference.sessions import GraphSession, SessionCache

Graph = Callable[..., bytes]


def test_session_returns_the_probabilities_of_the_graph(threshold_graph: Graph) -> None:
    slices = np.random.default_rng(0).random((5, 1, 16, 16), dtype=np.float32)
    found = GraphSession("d", threshold_graph(at=0.25), device="cpu").run(slices).probabilities
    assert found.shape == (5, 2, 16, 16)
    assert found.dtype == np.float32
    expected = 1 / (1 + np.exp(-8 * (slices[:, 0].astype(float) - 0.25)))
    np.testing.assert_allclose(found[:, 1], expected, atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)


def test_session_of_the_same_slices_is_bit_identical(threshold_graph: Graph) -> None:
    slices = np.random.default_rng(0).random((3, 1, 16, 16), dtype=np.float32)
    graph = threshold_graph()
    results = {GraphSession("d", graph, device="cpu").run(slices).probabilities.tobytes() for _ in range(3)}
    assert len(results) == 1


def test_concurrent_requests_load_a_graph_once(threshold_graph: Graph) -> None:
    cache = SessionCache(2, device="cpu")
    reads, together = [], threading.Barrier(8)

    def read() -> bytes:
        reads.append(1)
        return threshold_graph()

    def ask(_: int) -> GraphSession:
        together.wait()
        return cache.get("sha256:a", read)

    with ThreadPoolExecutor(8) as pool:
        sessions = set(pool.map(ask, range(8)))
    assert (len(reads), len(sessions), len(cache)) == (1, 1, 1)


def test_first_sessions_of_several_threads_make_the_shared_allocator_once(
    threshold_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, second = [], threading.Event()

    def make(_: object, configuration: object) -> None:
        made.append(configuration)
        if len(made) > 1:
            second.set()
        second.wait(0.2)

    monkeypatch.setattr(providers.onnxruntime, "create_and_register_allocator", make)
    # A limit that no other test has, since it is made once per process.
    limits = GraphLimits(memory_bytes=2**30 + 4321)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: GraphSession("d", threshold_graph(), device="cpu", limits=limits), range(2)))
    assert len(made) == 1


def test_cache_evicts_the_least_recently_used_session(threshold_graph: Graph) -> None:
    cache = SessionCache(2, device="cpu")
    loads: list[str] = []

    def get(name: str) -> GraphSession:
        def read() -> bytes:
            loads.append(name)
            return threshold_graph()

        return cache.get(name, read)

    first = get("a")
    for name in ("b", "a", "c", "a", "b"):
        get(name)
    assert loads == ["a", "b", "c", "b"]
    assert len(cache) == 2
    assert first.run(np.zeros((1, 1, 16, 16), np.float32)).probabilities.shape == (1, 2, 16, 16)


def test_failed_load_is_raised_and_not_cached(threshold_graph: Graph) -> None:
    cache = SessionCache(2, device="cpu")

    def damaged() -> bytes:
        raise ArtefactDamaged("graph.onnx was changed")

    with pytest.raises(ArtefactDamaged, match="changed"):
        cache.get("a", damaged)
    assert len(cache) == 0
    assert cache.get("a", threshold_graph).digest == "a"


@pytest.mark.parametrize("content", [b"", b"not a graph", b"\x08\x0a" * 100])
def test_session_of_invalid_bytes_is_rejected(content: bytes) -> None:
    with pytest.raises((ArtefactDamaged, GraphRefused), match="sha256:bad"):
        GraphSession("sha256:bad", content, device="cpu")


def test_session_of_a_graph_with_other_names_is_rejected(threshold_graph: Graph) -> None:
    with pytest.raises(ArtefactDamaged, match="expected an input 'image'"):
        GraphSession("d", threshold_graph(output="logits_or_so"), device="cpu")


@pytest.mark.skipif(providers.cuda_is_possible(), reason="this machine has a GPU")
def test_session_without_a_gpu_uses_the_cpu_and_rejects_cuda(
    threshold_graph: Graph, capfd: pytest.CaptureFixture[str]
) -> None:
    assert GraphSession("d", threshold_graph(), device="auto").provider == providers.CPU
    assert capfd.readouterr() == ("", "")
    with pytest.raises(GpuUnavailable, match="LOCUM_DEVICE=cuda"):
        GraphSession("d", threshold_graph(), device="cuda")
