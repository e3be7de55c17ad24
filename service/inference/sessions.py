"""Loaded networks: a bounded cache of onnxruntime sessions, one per graph digest.

Keyed by the graph's own digest, so two artefacts that share a graph share its session, and a new version
never meets an old network. A graph is read, checked and loaded once however many requests ask for it at that
moment; the least recently used session is dropped first, and stays alive until its last run ends.

A graph is input: it is checked before onnxruntime sees it (`model_store.graphs`), a run of it has a deadline,
and the memory of all runs has a bound.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.utils import Extractor
from onnxruntime import OrtValue

from model_store.errors import ArtefactDamaged
from model_store.graphs import check_graph
from service.errors import GpuUnavailable, RunTooLarge, RunTooLong
from service.inference.joined import JoinedRuns
from service.inference.limits import GraphLimits

# Slices per run: bounds the memory of activations and probabilities, whatever the volume's length.
BATCH = 8
IMAGE = "image"
QUERY = "query"
# Smaller ones, shapes and axes among them, stay within the graph, where they are read while it is optimised.
_LARGE = 1024
# What a node without inputs from outside gives is computed while a graph is loaded, beyond the limits of its
# runs. Shapes, axes and positions are far smaller than this.
_MOST_FOLDED_BYTES = 2**20


class GraphPart(NamedTuple):
    """A graph's bytes, and those of its weights, by name, that lie outside."""

    graph: bytes
    weights: Mapping[str, OrtValue]


def split_at_query(graph: bytes, model: ModelProto) -> tuple[GraphPart, ...]:
    """`graph` alone; of one that has a query, what gives it and what takes it, which share their weights.

    `model` is the parsed graph, which is used up.
    """
    outputs = [output.name for output in model.graph.output]
    if QUERY not in outputs:
        return (GraphPart(graph, {}),)
    weights = dict(_moved_out(model))
    extractor = Extractor(model)
    halves = (
        extractor.extract_model([IMAGE], [QUERY]),
        extractor.extract_model([IMAGE, QUERY], [name for name in outputs if name != QUERY]),
    )
    return tuple(_part(half, weights) for half in halves)


def _part(half: ModelProto, weights: Mapping[str, OrtValue]) -> GraphPart:
    names = (tensor.name for tensor in half.graph.initializer if tensor.name in weights)
    return GraphPart(half.SerializeToString(), {name: weights[name] for name in names})


def _moved_out(model: ModelProto) -> Iterator[tuple[str, OrtValue]]:
    """The large weights of a graph, by name, while they are moved out of it."""
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= _LARGE:
            yield tensor.name, OrtValue.ortvalue_from_numpy(numpy_helper.to_array(tensor))
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="memory")


CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"

_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/nvidia0"), Path("/dev/dxg"))
_log = logging.getLogger("locum.service")


@cache
def cuda_is_possible() -> bool:
    """Whether this build knows CUDA and an NVIDIA device is to be seen; loads the CUDA libraries if so."""
    if CUDA not in onnxruntime.get_available_providers() or not any(f.exists() for f in _DEVICE_FILES):
        return False
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        onnxruntime.preload_dlls()
    if said.getvalue():
        _log.warning("onnxruntime could not load every CUDA library: %s", " ".join(said.getvalue().split()))
    return True


def wanted_providers(device: str) -> list[Any]:
    """The providers to ask a session for, in order; `device` as LOCUM_DEVICE.

    On CUDA, cuDNN's algorithm search and TF32 are off: both would let equal scans get unequal masks.
    """
    if device == "cpu" or (device == "auto" and not cuda_is_possible()):
        return [CPU]
    cuda_is_possible()
    index = device.partition(":")[2] or "0"
    return [(CUDA, {"device_id": index, "cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0"}), CPU]


OUTPUT = "probabilities"
ATTENTION = "attention"
ENTRIES, SIMILARITIES = "entries", "similarities"
_ERRORS_ONLY = 3
# In the message of onnxruntime's arena.
_OUT_OF_MEMORY = "is smaller than requested bytes"
_DEFAULT_LIMITS = GraphLimits()
_MAKING_ALLOCATOR = threading.Lock()


class Outputs(NamedTuple):
    """Class probabilities [S, K, …]; of a network with cross-attention, its shares [S, sources] too; of one
    with a pool, which entries each slice picked and how similar they are, [S, C]."""

    probabilities: NDArray[np.float32]
    attention: NDArray[np.float32] | None = None
    entries: NDArray[np.int64] | None = None
    similarities: NDArray[np.float32] | None = None


class GraphSession:
    """One loaded graph. Safe to run from several threads at once."""

    def __init__(
        self,
        digest: str,
        graph: bytes,
        *,
        threads: int = 0,
        device: str = "auto",
        limits: GraphLimits = _DEFAULT_LIMITS,
    ) -> None:
        """Load `graph` (the bytes of an onnx file). Raises GraphRefused, ArtefactDamaged, GpuUnavailable."""
        model = check_graph(graph, f"graph {digest}", limits.operators)
        _share_bounded_memory(limits.memory)
        try:
            sessions = [_load(part, threads, device) for part in split_at_query(graph, model)]
            outputs = {output.name for output in sessions[-1].get_outputs()}
            inputs = {node.name for session in sessions for node in session.get_inputs()}
        except Exception as error:  # onnx and onnxruntime raise a dozen unrelated types here
            raise ArtefactDamaged(
                f"graph {digest}: onnxruntime cannot load it ({type(error).__name__}); "
                "publish the model again"
            ) from error
        *self._asking, self._session = sessions
        self.has_pool = bool(self._asking)
        wanted = {IMAGE, QUERY} if self.has_pool else {IMAGE}
        if inputs != wanted or OUTPUT not in outputs:
            raise ArtefactDamaged(
                f"graph {digest}: expected an input '{IMAGE}' and an output '{OUTPUT}', "
                f"found {sorted(inputs)} and {sorted(outputs)}; publish the model again"
            )
        self.digest = digest
        self._limits = limits
        self._outputs = [name for name in (OUTPUT, ATTENTION, ENTRIES, SIMILARITIES) if name in outputs]
        # Asked of the session itself: what was wanted is not what one gets.
        self.provider: str = self._session.get_providers()[0]
        if device.startswith("cuda") and self.provider != CUDA:
            raise GpuUnavailable(
                f"LOCUM_DEVICE={device}, but onnxruntime cannot use it here; see the service's log, or set "
                "LOCUM_DEVICE=auto."
            )
        # Several runs at once only where they have cores of their own.
        at_once = max(1, (os.cpu_count() or 1) // threads) if threads and self.provider == CPU else 1
        self.joined = JoinedRuns(digest, self._arrays, at_once=at_once, most=BATCH)

    def run(self, slices: NDArray[np.float32]) -> Outputs:
        """What the graph gives for slices [S, C, H, W], each for itself.

        Other threads' slices may be joined to the same run, which changes no bit.

        Raises RunTooLong, RunTooLarge.
        """
        return self._named(self.joined(slices))

    def run_alone(self, slices: NDArray[np.float32], query: NDArray[np.float32] | None = None) -> Outputs:
        """The same in a run of these slices alone, for a graph that takes a scan as a whole.

        With `query` [1, Q], for a graph with a pool: all slices pick by it, instead of each by its own.
        """
        return self._named(self._arrays(slices, query))

    def _named(self, arrays: Sequence[NDArray[Any]]) -> Outputs:
        return Outputs(**dict(zip(self._outputs, arrays, strict=True)))

    def _arrays(
        self, slices: NDArray[np.float32], query: NDArray[np.float32] | None = None
    ) -> list[NDArray[Any]]:
        inputs = {IMAGE: np.ascontiguousarray(slices)}
        if self.has_pool:
            # As many queries as slices: the graph's inputs share their B, which onnxruntime plans memory by.
            inputs[QUERY] = self.queries(slices) if query is None else query.repeat(len(slices), axis=0)
        return self._run(self._session, self._outputs, inputs)

    def queries(self, slices: NDArray[np.float32]) -> NDArray[np.float32]:
        """[S, Q]: what slices are looked up by in the graph's pool; nothing else of it is run."""
        (asking,) = self._asking
        return self._run(asking, [QUERY], {IMAGE: np.ascontiguousarray(slices)})[0]

    def _run(
        self,
        session: onnxruntime.InferenceSession,
        outputs: Sequence[str],
        inputs: Mapping[str, NDArray[Any]],
    ) -> list[NDArray[Any]]:
        """Run a session within the limits. Raises RunTooLong, RunTooLarge."""
        count = len(inputs[IMAGE])
        options, late = onnxruntime.RunOptions(), threading.Event()

        def end() -> None:
            late.set()
            # Looked at between nodes, also inside of loops.
            options.terminate = True

        watchdog = threading.Timer(count * self._limits.seconds_per_slice, end)
        watchdog.daemon = True
        watchdog.start()
        try:
            return _within_memory(session, outputs, inputs, options)
        except Exception as error:  # onnxruntime raises a dozen unrelated types here
            if late.is_set():
                raise RunTooLong(
                    f"graph {self.digest}: a run of {count} slices took longer than "
                    f"{self._limits.seconds_per_slice:g} s for each and was ended: on a slow machine set "
                    "LOCUM_SECONDS_PER_SLICE higher; else withdraw the model."
                ) from error
            if _OUT_OF_MEMORY in str(error):
                raise RunTooLarge(
                    f"graph {self.digest}: a run of {count} slices needs more than the {self._limits.memory} "
                    "bytes that networks may use together: send a smaller scan, set "
                    "LOCUM_INFERENCE_MEMORY_BYTES higher, or withdraw the model."
                ) from error
            raise
        finally:
            watchdog.cancel()


def _share_bounded_memory(limit: int) -> None:
    """Make the allocator that every session of this process shares, once: of at most `limit` bytes."""
    # A cache alone lets two first calls run at once.
    with _MAKING_ALLOCATOR:
        _make_allocator(limit)


@cache
def _make_allocator(limit: int) -> None:
    cpu = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(cpu, onnxruntime.OrtArenaCfg({"max_mem": limit}))


def _within_memory(
    session: onnxruntime.InferenceSession,
    outputs: Sequence[str],
    inputs: Mapping[str, NDArray[Any]],
    options: onnxruntime.RunOptions,
) -> list[NDArray[Any]]:
    """Run a session. Where memory is short, what earlier runs left unused is given back first."""
    for is_last in (False, False, True):
        try:
            found: list[NDArray[Any]] = session.run(outputs, inputs, options)
            return found
        except Exception as error:  # as above
            if is_last or _OUT_OF_MEMORY not in str(error):
                raise
            # Done at the end of the next run, also of one that fails.
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    raise AssertionError


def _load(part: GraphPart, threads: int, device: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    options.use_deterministic_compute = True
    # Threads that spin between two scans would take the cores from the scan in hand, and from everyone.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_external_initializers([*part.weights], [*part.weights.values()])
    options.add_session_config_entry("session.use_env_allocators", "1")
    # The weights go with their session; what runs share stays.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    options.add_session_config_entry(
        "optimization.constant_folding_max_output_size_in_bytes", str(_MOST_FOLDED_BYTES)
    )
    # What was checked is what is loaded: not the other format that the same bytes may be.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    with tempfile.TemporaryDirectory(prefix="locum-") as empty:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", empty)
        return onnxruntime.InferenceSession(part.graph, options, providers=wanted_providers(device))


class SessionCache:
    """At most `capacity` sessions, by graph digest. Safe from any thread."""

    def __init__(
        self,
        capacity: int,
        *,
        threads: int = 0,
        device: str = "auto",
        limits: GraphLimits = _DEFAULT_LIMITS,
    ) -> None:
        self.capacity = capacity
        self._limits = limits
        self._threads = threads
        self._device = device
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, Future[GraphSession]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, digest: str, read: Callable[[], bytes]) -> GraphSession:
        """The session of the graph with this digest; `read` gives its checked bytes if it must be loaded.

        Blocking: a graph takes a second or so to load. Raises what `read` and `GraphSession` raise, to
        everyone who waited for it; the next call tries again.
        """
        with self._lock:
            future = self._sessions.get(digest)
            mine = future is None
            if future is None:
                future = self._sessions[digest] = Future()
            self._sessions.move_to_end(digest)
            while len(self._sessions) > self.capacity:
                self._sessions.popitem(last=False)
        if mine:
            try:
                session = GraphSession(
                    digest, read(), threads=self._threads, device=self._device, limits=self._limits
                )
                future.set_result(session)
            except BaseException as error:
                with self._lock:
                    if self._sessions.get(digest) is future:
                        del self._sessions[digest]
                future.set_exception(error)
        return future.result()
