"""A GPU's errors, injected: memory that is full, a provider that is missing, onnxruntime's own fallback."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as native

from model_store.errors import ArtefactDamaged
from service.errors import GpuMemoryFull, GpuUnavailable
from service.inference import loading, providers
from service.inference.limits import GraphLimits
from service.inference.providers import CPU, CUDA, TENSORRT, wanted_providers
from service.inference.sessions import BATCH, GraphSession, probe_provider
from service.settings import Settings, graph_limits
from tests.helpers.service.counted_runs import counted

Graph = Callable[..., bytes]
# As onnxruntime 1.31 says it of an allocation by CUDA, and of its own arena.
FULL = [
    native.RuntimeException("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : CUDA failure 2: out of memory"),
    native.Fail(
        "[ONNXRuntimeError] : 1 : FAIL : Available memory of 10 is smaller than requested bytes of 99"
    ),
    native.Fail("[ONNXRuntimeError] : 1 : FAIL : CUBLAS failure 3: the resource allocation failed ; GPU=0"),
]


@pytest.mark.parametrize("error", FULL)
def test_full_gpu_at_a_load_is_no_damaged_artefact(
    error: Exception, threshold_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(onnxruntime, "InferenceSession", fails)
    with pytest.raises(GpuMemoryFull, match="graph d: the GPU has no room to load it") as caught:
        GraphSession("d", threshold_graph(), device="auto")
    assert caught.value.status == 503
    assert caught.value.headers["Retry-After"] == "10"


@pytest.mark.parametrize("error", FULL)
@pytest.mark.parametrize("room", [1, 2, 3])
def test_run_that_does_not_fit_is_run_in_halves(error: Exception, room: int, threshold_graph: Graph) -> None:
    session = on_pretended_gpu(threshold_graph(), error, room)
    slices = np.random.default_rng(0).random((7, 1, 8, 8), dtype=np.float32)
    expected = GraphSession("d", threshold_graph(), device="cpu").run(slices).probabilities
    np.testing.assert_array_equal(session.run(slices).probabilities, expected)


@pytest.mark.parametrize("error", FULL)
def test_run_gets_what_earlier_ones_left_unused_in_the_arena(
    error: Exception, threshold_graph: Graph
) -> None:
    session = on_pretended_gpu(threshold_graph(), error, 7)
    shrunk: list[str] = []
    inner = session._session

    class Filled:
        """Without room until its arena was shrunk, which is at the end of a run that asked for it."""

        def run(self, outputs: Any, inputs: Any, options: Any) -> Any:
            if shrunk:
                return inner.run(outputs, inputs, options)
            with suppress(RuntimeError):  # the first run does not ask
                shrunk.append(options.get_run_config_entry("memory.enable_memory_arena_shrinkage"))
            raise error

    session._session = Filled()
    assert len(session.run(np.zeros((7, 1, 8, 8), np.float32)).probabilities) == 7
    assert shrunk == ["gpu:0"]


def test_gpu_sees_two_numbers_of_slices_alone(threshold_graph: Graph) -> None:
    session = on_pretended_gpu(threshold_graph(), FULL[0], BATCH)
    counts = counted(session)
    on_cpu = GraphSession("d", threshold_graph(), device="cpu")
    for count in range(1, BATCH + 1):
        slices = np.random.default_rng(count).random((count, 1, 8, 8), dtype=np.float32)
        expected = on_cpu.run(slices).probabilities
        np.testing.assert_array_equal(session.run(slices).probabilities, expected)
    assert counts == [1] + [BATCH] * (BATCH - 1)
    # A graph that takes a scan as a whole measures its slices, so that it gets no other.
    session.run_alone(slices[:5])
    assert counts[-1] == 5


@pytest.mark.parametrize(("slices", "gives_back"), [(1, False), (BATCH, False), (BATCH + 1, True)])
def test_memory_is_given_back_after_a_run_larger_than_usual(
    slices: int, gives_back: bool, threshold_graph: Graph
) -> None:
    session = on_pretended_gpu(threshold_graph(), FULL[0], 99)
    asked: list[str] = []
    inner = session._session

    class Noted:
        def run(self, outputs: Any, inputs: Any, options: Any) -> Any:
            with suppress(RuntimeError):  # a run that does not ask has no such entry
                asked.append(options.get_run_config_entry("memory.enable_memory_arena_shrinkage"))
            return inner.run(outputs, inputs, options)

    session._session = Noted()
    session.run_alone(np.zeros((slices, 1, 8, 8), np.float32))
    assert asked == (["gpu:0"] if gives_back else [])


def test_slice_that_does_not_fit_is_refused_with_a_time_to_try_again(threshold_graph: Graph) -> None:
    session = on_pretended_gpu(threshold_graph(), FULL[0], 0)
    with pytest.raises(GpuMemoryFull, match="the GPU has no room for a slice") as caught:
        session.run(np.zeros((4, 1, 8, 8), np.float32))
    assert caught.value.extensions["retry_after"] == 10


def test_volume_as_a_whole_is_not_cut(threshold_graph: Graph) -> None:
    session = on_pretended_gpu(threshold_graph(), FULL[0], 2)
    with pytest.raises(GpuMemoryFull, match="no room for 4 slices"):
        session.run_alone(np.zeros((4, 1, 8, 8), np.float32))


def test_run_whose_provider_fails_is_not_repeated_on_the_cpu(threshold_graph: Graph) -> None:
    """onnxruntime would build the session again on the CPU, and the receipt would name the GPU."""
    session = GraphSession("d", threshold_graph(), device="cpu")
    session.provider = CUDA
    inner = session._session._sess

    class Fails:
        def run(self, *_: Any) -> None:
            raise native.EPFail("[ONNXRuntimeError] : 11 : EP_FAIL : CUDA")

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    session._session._sess = Fails()
    with pytest.raises(native.EPFail):
        session.run(np.zeros((1, 1, 8, 8), np.float32))


def test_fallback_of_auto_beside_a_device_is_said_once(
    threshold_graph: Graph, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(providers, "_DEVICE_FILES", (Path("/dev/null"),))
    monkeypatch.setattr(loading, "wanted_providers", lambda *_: [CPU])
    providers._warn_of_fallback.cache_clear()
    caplog.set_level(logging.WARNING, "locum.service")
    for _ in range(2):
        assert GraphSession("d", threshold_graph(), device="auto").provider == CPU
    assert [message for message in caplog.messages if "answered on the CPU" in message] == caplog.messages
    assert len(caplog.messages) == 1


# As the provider says it beside a driver for an earlier CUDA.
OLD_DRIVER = RuntimeError(
    "/onnxruntime_src/cuda_execution_provider_info.cc:63 [ONNXRuntimeError] : 1 : FAIL : Failed to parse "
    'provider option "device_id": CUDA failure 35: CUDA driver version is insufficient for CUDA runtime '
    "version ; GPU=-1 ; hostname=vm ; expr=cudaGetDeviceCount(&num_devices);"
)


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every session on CUDA fails to load."""
    real = onnxruntime.InferenceSession

    def load(graph: bytes, options: Any, providers: list[Any], enable_fallback: int) -> Any:
        assert enable_fallback == 0
        if providers != [CPU]:
            raise OLD_DRIVER
        return real(graph, options, providers=providers)

    monkeypatch.setattr(onnxruntime, "InferenceSession", load)
    monkeypatch.setattr(providers, "cuda_is_possible", lambda: True)
    monkeypatch.setattr(providers, "_DEVICE_FILES", (Path("/dev/null"),))
    providers._warn_of_fallback.cache_clear()


@pytest.mark.usefixtures("old_driver")
def test_driver_that_is_too_old_is_named_and_is_no_damaged_artefact(
    threshold_graph: Graph, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "locum.service")
    said = r"\(CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version\)"
    with pytest.raises(GpuUnavailable, match=f"onnxruntime cannot use it here {said}; see"):
        GraphSession("d", threshold_graph(), device="cuda")
    assert caplog.messages == []
    assert GraphSession("d", threshold_graph(), device="auto").provider == CPU
    assert re.match(f"LOCUM_DEVICE=auto {said}: this machine has", caplog.messages[0])
    with pytest.raises(ArtefactDamaged, match="publish the model again"):
        GraphSession("d", b"", device="auto")


def test_probe_refuses_a_gpu_that_is_demanded_and_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "wanted_providers", lambda *_: [CPU])
    with pytest.raises(GpuUnavailable, match="LOCUM_DEVICE=cuda:7"):
        probe_provider("cuda:7")
    assert probe_provider("cpu") == CPU


def test_cuda_gets_the_bound_of_its_memory_and_float32() -> None:
    (provider, options), then = wanted_providers("cuda:1", 2**30)
    assert (provider, then) == (CUDA, CPU)
    assert options["gpu_mem_limit"] == str(2**30)
    assert (options["device_id"], options["use_tf32"]) == ("1", "0")
    assert "gpu_mem_limit" not in wanted_providers("cuda")[0][1]


def test_tensorrt_is_asked_for_before_cuda_and_counts_as_a_gpu(
    threshold_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = wanted_providers("cuda:1", 2**30, tensorrt=True)
    assert first == (TENSORRT, {"device_id": "1"})
    assert others == wanted_providers("cuda:1", 2**30)
    asked: list[Any] = []
    real = onnxruntime.InferenceSession

    def loaded(graph: bytes, options: Any, providers: list[Any], **_: Any) -> Any:
        asked.extend(providers)
        session = real(graph, options, providers=[CPU])
        monkeypatch.setattr(session, "get_providers", lambda: [TENSORRT, CUDA, CPU])
        return session

    monkeypatch.setattr(onnxruntime, "InferenceSession", loaded)
    limits = graph_limits(Settings(tensorrt=True))
    session = GraphSession("d", threshold_graph(), device="cuda:0", limits=limits)
    assert (session.provider, session._arena) == (TENSORRT, "gpu:0")
    assert asked[0] == (TENSORRT, {"device_id": "0"})


def on_pretended_gpu(graph: bytes, error: Exception, room: int) -> GraphSession:
    """A session that says it is on a GPU, with room for so many slices in a run."""
    session = GraphSession("d", graph, device="cpu", limits=GraphLimits())
    session.provider, session._arena = CUDA, "gpu:0"
    inner = session._session

    class Bounded:
        def run(self, outputs: Any, inputs: Any, options: Any) -> Any:
            if len(inputs["image"]) > room:
                raise error
            return inner.run(outputs, inputs)

    session._session = Bounded()
    return session
