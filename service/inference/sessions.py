"""Loaded networks: a bounded cache of onnxruntime sessions, one per graph digest.

Keyed by the graph's own digest, so two artefacts that share a graph share its session, and a new version
never meets an old network. A graph is read, checked and loaded once however many requests ask for it at that
moment; the least recently used session is dropped first, and stays alive until its last run ends.

A graph is input: it is checked before onnxruntime sees it (`model_store.graphs`), its load and its runs have
deadlines, and the memory of all runs has a bound.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from model_store.preprocessing.volume_restore import as_probabilities
from service.errors import GpuMemoryFull, RunTooLarge, RunTooLong
from service.inference.deadlines import DEADLINES
from service.inference.gpu import card
from service.inference.joined import JoinedRuns
from service.inference.limits import GraphLimits
from service.inference.loading import IMAGE, OUTPUT, QUERY, load
from service.inference.providers import CPU, OUT_OF_MEMORY, gpu_is_full, is_gpu, memory_full
from service.inference.shift import Reference

# Slices per run at most: bounds the memory of activations and probabilities, whatever the volume's length.
BATCH = 8
# Pixels of a run on a CPU: more leave its caches, which costs 3 to 15 %, and fewer pay a run's fixed costs.
_PIXELS = 2**17
_SHRINK, _CPU_ARENA = "memory.enable_memory_arena_shrinkage", "cpu:0"
_DEFAULT_LIMITS = GraphLimits()
_log = logging.getLogger("locum.service")


@dataclass(frozen=True)
class Outputs:
    """What a graph gives for S slices: class probabilities [S, K, …], as `softmaxed` or by its `logits`.

    A network with cross-attention gives its shares [S, sources] too; one with a pool, which entries each
    slice picked and how similar they are, [S, C]; of one that averages them over windows, logits [S, K, …];
    the moments [S, 2 C] by which the shift is measured.
    """

    softmaxed: NDArray[np.float32] | None = None
    attention: NDArray[np.float32] | None = None
    entries: NDArray[np.int64] | None = None
    similarities: NDArray[np.float32] | None = None
    logits: NDArray[np.float32] | None = None
    moments: NDArray[np.float32] | None = None

    @cached_property
    def probabilities(self) -> NDArray[np.float32]:
        """Class probabilities [S, K, …]."""
        if self.softmaxed is not None:
            return self.softmaxed
        assert self.logits is not None, "a graph gives probabilities or logits"
        return np.stack([as_probabilities(each, regions=False) for each in self.logits])


# By the names of a graph's outputs.
_FIELDS = {OUTPUT: "softmaxed"} | {each.name: each.name for each in fields(Outputs)[1:]}


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
        reference: Reference | None = None,
    ) -> None:
        """Load `graph` (the bytes of an onnx file); `reference` is what its scans are compared with.

        Raises GraphRefused, ArtefactDamaged, RunTooLong, GpuUnavailable, GpuMemoryFull.
        """
        self.reference = reference or Reference()
        loaded = load(digest, graph, threads, device, limits, self.reference.norms)
        self.digest = digest
        self.provider = loaded.provider
        self.has_pool = loaded.asking is not None
        # Seconds of a patch or a slice, by the scan that it answered last; None before the first.
        self.seconds_each: float | None = None
        self._limits = limits
        self._session, self._asking = loaded.session, loaded.asking
        self._outputs = [name for name in _FIELDS if name in loaded.outputs]
        self.gpu = card(device) if self._on_gpu else None
        number = device.partition(":")[2] or "0"
        self._arena = f"gpu:{number}" if self._on_gpu else _CPU_ARENA
        # Several runs at once only where they have cores of their own.
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
        return is_gpu(self.provider)

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
        return Outputs(**{_FIELDS[name]: each for name, each in zip(self._outputs, arrays, strict=True)})

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
        assert self._asking is not None
        found = self._run(self._asking, [QUERY], {IMAGE: np.ascontiguousarray(self._filled(slices))})
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
            if self._on_gpu and gpu_is_full(error):
                slices = "a slice" if count == 1 else f"{count} slices"
                raise memory_full(f"graph {self.digest}: the GPU has no room for {slices}") from error
            if OUT_OF_MEMORY in str(error):
                raise RunTooLarge(
                    f"graph {self.digest}: a run of {count} slices needs more than the {self._limits.memory} "
                    "bytes that networks may use together: send a smaller scan, set "
                    "LOCUM_INFERENCE_MEMORY_BYTES higher, or withdraw the model."
                ) from error
            raise


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
            full = gpu_is_full(error) if arena != _CPU_ARENA else OUT_OF_MEMORY in str(error)
            if is_last or not full:
                raise
            # Done at the end of the next run, also of one that fails.
            options.add_run_config_entry(_SHRINK, arena)
    raise AssertionError


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

    def loaded(self, digest: str) -> GraphSession | None:
        """The session of the graph with this digest, if it is loaded."""
        with self._lock:
            future = self._sessions.get(digest)
        return future.result() if future is not None and future.done() and not future.exception() else None

    def get(
        self, digest: str, read: Callable[[], bytes], reference: Callable[[], Reference] = Reference
    ) -> GraphSession:
        """The session of the graph with this digest. If it must be loaded, `read` gives its checked bytes and
        `reference` what its scans are compared with.

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
                    digest,
                    read(),
                    threads=self._threads,
                    device=self._device,
                    limits=self._limits,
                    reference=reference(),
                )
                future.set_result(session)
            except BaseException as error:
                with self._lock:
                    if self._sessions.get(digest) is future:
                        del self._sessions[digest]
                future.set_exception(error)
        return future.result()
