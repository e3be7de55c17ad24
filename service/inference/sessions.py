"""Loaded networks: a bounded cache of onnxruntime sessions, one per graph digest.

Keyed by the graph's own digest, so two artefacts that share a graph share its session, and a new version
never meets an old network. A graph is read, checked and loaded once however many requests ask for it at that
moment; the least recently used session is dropped first, and stays alive until its last run ends.

A graph is input: it is checked before onnxruntime sees it (`model_store.graphs`), its load and its runs have
deadlines, and the memory of all runs has a bound.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime import OrtValue
from onnxruntime.capi.onnxruntime_pybind11_state import ModelLoadCanceled

from model_store.errors import ArtefactDamaged
from model_store.graphs import check_graph
from service.errors import GpuMemoryFull, GpuUnavailable, RunTooLarge, RunTooLong
from service.inference.deadlines import DEADLINES
from service.inference.gpu import card
from service.inference.joined import JoinedRuns
from service.inference.limits import GraphLimits

if TYPE_CHECKING:
    from onnx import ModelProto

# Slices per run at most: bounds the memory of activations and probabilities, whatever the volume's length.
BATCH = 8
# Pixels of a run on a CPU: more leave its caches, which costs 3 to 15 %, and fewer pay a run's fixed costs.
_PIXELS = 2**17
IMAGE = "image"
QUERY = "query"
# Smaller ones, shapes and axes among them, stay within the graph, where they are read while it is optimised.
_LARGE = 1024
# What a node without inputs from outside gives is computed while a graph is loaded, beyond the limits of its
# runs. Shapes, axes and positions are far smaller than this.
_MOST_FOLDED_BYTES = 2**20


# A load may take as long as a run of so many slices, and at least so long.
_SLICES_OF_A_LOAD = 5
_LEAST_LOAD_SECONDS = 60.0


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
    from onnx.utils import Extractor

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
    from onnx import TensorProto, numpy_helper

    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= _LARGE:
            yield tensor.name, OrtValue.ortvalue_from_numpy(numpy_helper.to_array(tensor))
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="memory")


CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
# The value of LOCUM_DEVICE.
_OPENVINO = "openvino"

_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/nvidia0"), Path("/dev/dxg"))
_log = logging.getLogger("locum.service")


def cuda_device_seen() -> bool:
    """Whether this machine, or container, has an NVIDIA device."""
    return any(file.exists() for file in _DEVICE_FILES)


@cache
def cuda_is_possible() -> bool:
    """Whether this build knows CUDA and an NVIDIA device is to be seen; loads the CUDA libraries if so."""
    if not cuda_device_seen():
        return False
    if CUDA not in onnxruntime.get_available_providers():
        _log.warning(
            "this machine has an NVIDIA device, and onnxruntime %s is built without CUDA: install "
            "onnxruntime-gpu in its place, or set LOCUM_DEVICE=cpu",
            onnxruntime.__version__,
        )
        return False
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        onnxruntime.preload_dlls()
    if said.getvalue():
        _log.warning("onnxruntime could not load every CUDA library: %s", " ".join(said.getvalue().split()))
    return True


def wanted_providers(device: str, gpu_memory: int = 0, tensorrt: bool = False, threads: int = 0) -> list[Any]:
    """The providers to ask a session for, in order; `device` as LOCUM_DEVICE.

    On CUDA, cuDNN takes its algorithms by a fixed rule, and TF32 is off: a search by time, or products of 10
    bits, would let equal scans get unequal masks. A session's arena has at most `gpu_memory` bytes (0: no
    bound), and grows by what a run asks for. With `tensorrt` that provider comes first, by its own defaults.
    OpenVINO computes in float32 what is not in int8, never in bfloat16.
    """
    if device == _OPENVINO and OPENVINO in onnxruntime.get_available_providers():
        own = {"device_type": "CPU", "precision": "ACCURACY", "num_streams": "1"}
        return [(OPENVINO, own | ({"num_of_threads": str(threads)} if threads else {})), CPU]
    if device in ("cpu", _OPENVINO) or (device == "auto" and not cuda_is_possible()):
        return [CPU]
    cuda_is_possible()
    options = {
        "device_id": device.partition(":")[2] or "0",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
        "arena_extend_strategy": "kSameAsRequested",
    }
    if gpu_memory:
        options["gpu_mem_limit"] = str(gpu_memory)
    asked: list[Any] = [(CUDA, options), CPU]
    return [(TENSORRT, {"device_id": options["device_id"]}), *asked] if tensorrt else asked


OUTPUT = "probabilities"
ATTENTION = "attention"
ENTRIES, SIMILARITIES = "entries", "similarities"
LOGITS = "logits"
_ERRORS_ONLY = 3
# In the message of onnxruntime's arenas.
_OUT_OF_MEMORY = "is smaller than requested bytes"
# CUDA and its libraries say it in errors of several types.
_GPU_OUT_OF_MEMORY = (
    *("out of memory", "OUT_OF_MEMORY", "STATUS_ALLOC_FAILED", "Failed to allocate memory"),
    # cuBLAS, which a network's first run starts.
    "the resource allocation failed",
    _OUT_OF_MEMORY,
)
_GPU_RETRY_SECONDS = 10
_SHRINK, _CPU_ARENA = "memory.enable_memory_arena_shrinkage", "cpu:0"
_DEFAULT_LIMITS = GraphLimits()
_MAKING_ALLOCATOR = threading.Lock()


class Outputs(NamedTuple):
    """Class probabilities [S, K, …]; of a network with cross-attention, its shares [S, sources] too; of one
    with a pool, which entries each slice picked and how similar they are, [S, C]; the logits [S, K, …] of an
    imported one, where they are averaged over windows."""

    probabilities: NDArray[np.float32]
    attention: NDArray[np.float32] | None = None
    entries: NDArray[np.int64] | None = None
    similarities: NDArray[np.float32] | None = None
    logits: NDArray[np.float32] | None = None


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
        """Load `graph` (the bytes of an onnx file).

        Raises GraphRefused, ArtefactDamaged, RunTooLong, GpuUnavailable, GpuMemoryFull.
        """
        model = check_graph(graph, f"graph {digest}", limits.operators)
        _share_bounded_memory(limits.memory)
        try:
            seconds = max(_LEAST_LOAD_SECONDS, _SLICES_OF_A_LOAD * limits.seconds_per_slice)
            parts = split_at_query(graph, model)
            providers = wanted_providers(device, limits.gpu_memory_bytes, limits.tensorrt, threads)
            sessions, refused = _load_on_first(providers, parts, threads, seconds)
            outputs = {output.name for output in sessions[-1].get_outputs()}
            inputs = {node.name for session in sessions for node in session.get_inputs()}
        except ModelLoadCanceled as error:
            raise RunTooLong(
                f"graph {digest}: it was not loaded in {seconds:g} s, and its loading was ended: on a slow "
                "machine set LOCUM_SECONDS_PER_SLICE higher; else withdraw the model."
            ) from error
        except Exception as error:  # onnx and onnxruntime raise a dozen unrelated types here
            if device != "cpu" and _gpu_is_full(error):
                raise _memory_full(f"graph {digest}: the GPU has no room to load it") from error
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
        # By the volume that it segmented last; None before the first.
        self.seconds_per_patch: float | None = None
        self._limits = limits
        self._outputs = [
            name for name in (OUTPUT, ATTENTION, ENTRIES, SIMILARITIES, LOGITS) if name in outputs
        ]
        # Asked of the session itself: what was wanted is not what one gets.
        self.provider: str = self._session.get_providers()[0]
        if device == _OPENVINO and self.provider != OPENVINO:
            raise GpuUnavailable(
                "LOCUM_DEVICE=openvino, but this onnxruntime has no OpenVINO: install onnxruntime-openvino "
                "in place of onnxruntime-gpu, or set LOCUM_DEVICE=cpu."
            )
        if device.startswith("cuda") and not self._on_gpu:
            raise GpuUnavailable(
                f"LOCUM_DEVICE={device}, but onnxruntime cannot use it here{_in_words(refused)}; see the "
                "service's log, or set LOCUM_DEVICE=auto."
            )
        _warn_of_fallback(device, self.provider, _in_words(refused))
        # Several runs at once only where they have cores of their own.
        self.gpu = card(device) if self._on_gpu else None
        number = device.partition(":")[2] or "0"
        self._arena = f"gpu:{number}" if self._on_gpu else _CPU_ARENA
        at_once = max(1, (os.cpu_count() or 1) // threads) if threads and not self._on_gpu else 1
        self.joined = JoinedRuns(digest, self._arrays, at_once=at_once, most=self._joined_slices)

    def slices_per_run(self, shape: tuple[int, ...]) -> int:
        """How many slices of a shape [C, H, W] are run together: of large ones fewer on a CPU."""
        return BATCH if self._on_gpu else min(BATCH, max(1, _PIXELS // math.prod(shape[1:])))

    def _joined_slices(self, shape: tuple[int, ...]) -> int:
        # On a GPU, a run of another number of slices costs more than joining saves (`_filled`).
        return 1 if self._on_gpu else self.slices_per_run(shape)

    @property
    def _on_gpu(self) -> bool:
        return self.provider in (CUDA, TENSORRT)

    def run(self, slices: NDArray[np.float32]) -> Outputs:
        """What the graph gives for slices [S, C, H, W], each for itself.

        On a CPU, other threads' slices may be joined to the same run, which changes no bit. Where a GPU has
        no room for a run, its slices are run in halves.

        Raises RunTooLong, RunTooLarge, GpuMemoryFull.
        """
        return self._named(self.joined(slices))

    def run_alone(self, slices: NDArray[np.float32], query: NDArray[np.float32] | None = None) -> Outputs:
        """The same in a run of these slices alone, for a graph that takes a scan as a whole.

        With `query` [1, Q], for a graph with a pool: all slices pick by it, instead of each by its own.
        """
        return self._named(self._arrays(slices, query, whole=query is None))

    def _named(self, arrays: Sequence[NDArray[Any]]) -> Outputs:
        return Outputs(**dict(zip(self._outputs, arrays, strict=True)))

    def _arrays(
        self, slices: NDArray[np.float32], query: NDArray[np.float32] | None = None, *, whole: bool = False
    ) -> list[NDArray[Any]]:
        if whole:
            return self._unhalved(slices, query, whole=True)
        found = self._halved(self._filled(slices), query)
        return [array[: len(slices)] for array in found]

    def _filled(self, slices: NDArray[np.float32]) -> NDArray[np.float32]:
        """On a GPU one slice, or `BATCH` with empty ones behind.

        cuDNN plans its kernels again for a run of another number of slices than the run before, which takes
        ten times as long as a run (docs/how-to/gpu.md).
        """
        empty = BATCH - len(slices)
        if not self._on_gpu or len(slices) == 1 or empty <= 0:
            return slices
        return np.concatenate([slices, np.zeros((empty, *slices.shape[1:]), np.float32)])

    def _halved(self, slices: NDArray[np.float32], query: NDArray[np.float32] | None) -> list[NDArray[Any]]:
        try:
            return self._unhalved(slices, query, whole=False)
        except GpuMemoryFull:
            if len(slices) == 1:
                raise
            _log.warning("graph %s: %d slices do not fit on the GPU; halving", self.digest, len(slices))
        middle = len(slices) // 2
        halves = [self._halved(half, query) for half in (slices[:middle], slices[middle:])]
        return [np.concatenate(pair) for pair in zip(*halves, strict=True)]

    def _unhalved(
        self, slices: NDArray[np.float32], query: NDArray[np.float32] | None, *, whole: bool
    ) -> list[NDArray[Any]]:
        inputs = {IMAGE: np.ascontiguousarray(slices)}
        if self.has_pool:
            # As many queries as slices: the graph's inputs share their B, which onnxruntime plans memory by.
            inputs[QUERY] = self.queries(slices) if query is None else query.repeat(len(slices), axis=0)
        # The usual number of slices is asked for again soon, a patch of a volume at once.
        return self._run(self._session, self._outputs, inputs, gives_back=whole and len(slices) > BATCH)

    def queries(self, slices: NDArray[np.float32]) -> NDArray[np.float32]:
        """[S, Q]: what slices are looked up by in the graph's pool; nothing else of it is run."""
        (asking,) = self._asking
        found = self._run(asking, [QUERY], {IMAGE: np.ascontiguousarray(self._filled(slices))})
        return found[0][: len(slices)]

    def _run(
        self,
        session: onnxruntime.InferenceSession,
        outputs: Sequence[str],
        inputs: Mapping[str, NDArray[Any]],
        *,
        gives_back: bool = False,
    ) -> list[NDArray[Any]]:
        """Run a session within the limits; on a GPU it `gives_back` what it took.

        Raises RunTooLong, RunTooLarge, GpuMemoryFull.
        """
        count = len(inputs[IMAGE])
        options, late = onnxruntime.RunOptions(), threading.Event()
        if gives_back and self._on_gpu:
            # A volume in one run takes most: its session must not keep that from the others for ever.
            options.add_run_config_entry(_SHRINK, self._arena)

        def end() -> None:
            late.set()
            # Looked at between nodes, also inside of loops.
            options.terminate = True

        try:
            with DEADLINES.within(count * self._limits.seconds_per_slice, end):
                return _within_memory(session, outputs, inputs, options, self._arena)
        except Exception as error:  # onnxruntime raises a dozen unrelated types here
            if late.is_set():
                raise RunTooLong(
                    f"graph {self.digest}: a run of {count} slices took longer than "
                    f"{self._limits.seconds_per_slice:g} s for each and was ended: on a slow machine set "
                    "LOCUM_SECONDS_PER_SLICE higher; else withdraw the model."
                ) from error
            if self._on_gpu and _gpu_is_full(error):
                slices = "a slice" if count == 1 else f"{count} slices"
                raise _memory_full(f"graph {self.digest}: the GPU has no room for {slices}") from error
            if _OUT_OF_MEMORY in str(error):
                raise RunTooLarge(
                    f"graph {self.digest}: a run of {count} slices needs more than the {self._limits.memory} "
                    "bytes that networks may use together: send a smaller scan, set "
                    "LOCUM_INFERENCE_MEMORY_BYTES higher, or withdraw the model."
                ) from error
            raise


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
    arena: str,
) -> list[NDArray[Any]]:
    """Run a session. Where memory is short, its `arena` first gives back what earlier runs left unused."""
    for is_last in (False, False, True):
        try:
            found: list[NDArray[Any]] = session.run(outputs, inputs, options)
            return found
        except Exception as error:  # as above
            full = _gpu_is_full(error) if arena != _CPU_ARENA else _OUT_OF_MEMORY in str(error)
            if is_last or not full:
                raise
            # Done at the end of the next run, also of one that fails.
            options.add_run_config_entry(_SHRINK, arena)
    raise AssertionError


def _gpu_is_full(error: Exception) -> bool:
    return any(words in str(error) for words in _GPU_OUT_OF_MEMORY)


def _memory_full(what: str) -> GpuMemoryFull:
    return GpuMemoryFull(
        f"{what}, which other networks, workers or programs use: send it again in {_GPU_RETRY_SECONDS} s; "
        "the operator can lower LOCUM_SESSION_CACHE, bound the workers by LOCUM_GPU_MEMORY_BYTES, or serve "
        "with LOCUM_DEVICE=cpu.",
        headers={"Retry-After": str(_GPU_RETRY_SECONDS)},
        retry_after=_GPU_RETRY_SECONDS,
    )


def _in_words(refused: Exception | None) -> str:
    """What a provider answered that could not be had, as the end of a sentence; nothing if none did."""
    if refused is None:
        return ""
    # CUDA's words are in the middle of several lines of places in onnxruntime's source.
    found = re.search(r"CUDA failure \d+: [^;]*[^; ]", str(refused))
    return f" ({found[0] if found else type(refused).__name__})"


@cache
def _warn_of_fallback(device: str, provider: str, why: str) -> None:
    """Say once that the CPU is used where a GPU is to be seen."""
    if device == "auto" and provider == CPU and cuda_device_seen():
        _log.warning("LOCUM_DEVICE=auto%s: %s", why, FALLBACK)


FALLBACK = (
    "this machine has an NVIDIA device, and onnxruntime cannot use it: scans are answered on the CPU; "
    "`python -m service doctor` says why; LOCUM_DEVICE=cuda refuses to start instead, cpu accepts it"
)


@cache
def _probe(device: str) -> GraphSession:
    """A graph of one convolution, which needs cuDNN too."""
    from onnx import TensorProto, helper

    image = helper.make_tensor_value_info(IMAGE, TensorProto.FLOAT, ["B", 1, "H", "W"])
    probabilities = helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["B", 2, "H", "W"])
    nodes = [
        helper.make_node("Conv", [IMAGE, "weight"], ["logits"], kernel_shape=[1, 1]),
        helper.make_node("Softmax", ["logits"], [OUTPUT], axis=1),
    ]
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [2, 1, 1, 1], [0.0, 1.0])
    graph = helper.make_graph(nodes, "probe", [image], [probabilities], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return GraphSession("of the probe", model.SerializeToString(), threads=1, device=device)


def probe_provider(device: str) -> str:
    """Run a small graph, and say which provider does it.

    Raises GpuUnavailable where `device` names a GPU that onnxruntime cannot use; what a run raises where it
    is lost.
    """
    session = _probe(device)
    if session.provider != CPU:
        session.run(np.zeros((1, 1, 8, 8), np.float32))
    return session.provider


def _load_on_first(
    providers: list[Any], parts: Sequence[GraphPart], threads: int, seconds: float
) -> tuple[list[onnxruntime.InferenceSession], Exception | None]:
    """Load the parts on the first provider that can be had, and say what one before it answered.

    An old driver or a hidden card fails the load, as a damaged graph does: only the CPU tells them apart.
    """
    refused: Exception | None = None
    for first in range(len(providers)):
        try:
            return [_load(part, threads, providers[first:], seconds) for part in parts], refused
        except ModelLoadCanceled:
            raise
        except Exception as error:  # onnxruntime raises a dozen unrelated types here
            if _gpu_is_full(error) or first == len(providers) - 1:
                raise
            refused = error
    raise AssertionError


def _load(
    part: GraphPart, threads: int, providers: list[Any], seconds: float
) -> onnxruntime.InferenceSession:
    """Load a part within so many seconds. Raises ModelLoadCanceled."""
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
        # Looked at between the steps of the optimisation.
        with DEADLINES.within(seconds, partial(options.set_load_cancellation_flag, True)):
            # Its own fallback would answer on the CPU, and the receipt would name the GPU.
            return onnxruntime.InferenceSession(part.graph, options, providers=providers, enable_fallback=0)


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
