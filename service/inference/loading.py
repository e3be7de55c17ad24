"""Load a graph that was checked, within a deadline, on the first provider that can be had."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import onnxruntime
from onnxruntime import OrtValue
from onnxruntime.capi.onnxruntime_pybind11_state import ModelLoadCanceled

from model_store.errors import ArtefactDamaged
from model_store.graphs import check_graph
from model_store.softmax import drop_softmax, write_softmax_in_passes
from service.errors import RunTooLong
from service.inference.deadlines import DEADLINES
from service.inference.limits import GraphLimits
from service.inference.providers import CPU, check_provider, gpu_is_full, memory_full, wanted_providers
from service.inference.shift import Norms

if TYPE_CHECKING:
    from onnx import ModelProto

IMAGE, QUERY = "image", "query"
OUTPUT, LOGITS = "probabilities", "logits"
# Smaller ones, shapes and axes among them, stay within the graph, where they are read while it is optimised.
_LARGE = 1024
# What a node without inputs from outside gives is computed while a graph is loaded, beyond the limits of its
# runs. Shapes, axes and positions are far smaller than this.
_MOST_FOLDED_BYTES = 2**20
# A load may take as long as a run of so many slices, and at least so long.
_SLICES_OF_A_LOAD = 5
_LEAST_LOAD_SECONDS = 60.0
# onnxruntime writes its errors to standard error, in colour, beside raising them.
_FATAL_ONLY = 4
_MAKING_ALLOCATOR = threading.Lock()


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


class Loaded(NamedTuple):
    """A loaded graph: its outputs and provider; of one with a query, what gives it is `asking`."""

    session: onnxruntime.InferenceSession
    asking: onnxruntime.InferenceSession | None
    outputs: frozenset[str]
    provider: str


def load(
    digest: str, graph: bytes, threads: int, device: str, limits: GraphLimits, norms: Norms | None = None
) -> Loaded:
    """Load `graph` (the bytes of an onnx file), with the moments of `norms` as one more output.

    Its softmax is left out where it gives the logits too. On a CPU another one is written in passes
    (`model_store.softmax`): on a GPU and in OpenVINO that was not measured.

    Raises GraphRefused, ArtefactDamaged, RunTooLong, GpuUnavailable, GpuMemoryFull.
    """
    model = check_graph(graph, f"graph {digest}", limits.operators)
    _share_bounded_memory(limits.memory)
    seconds = max(_LEAST_LOAD_SECONDS, _SLICES_OF_A_LOAD * limits.seconds_per_slice)
    try:
        providers = wanted_providers(device, limits.gpu_memory_bytes, limits.tensorrt, threads)
        changed = norms is not None and norms.add_to(model)
        dropped = drop_softmax(model, LOGITS)
        if dropped or (providers == [CPU] and write_softmax_in_passes(model)) or changed:
            graph = model.SerializeToString()
        parts = split_at_query(graph, model)
        sessions, refused = _load_on_first(providers, parts, threads, seconds)
        outputs = frozenset(output.name for output in sessions[-1].get_outputs())
        inputs = {node.name for session in sessions for node in session.get_inputs()}
    except ModelLoadCanceled as error:
        raise RunTooLong(
            f"graph {digest}: it was not loaded in {seconds:g} s, and its loading was ended: on a slow "
            "machine set LOCUM_SECONDS_PER_SLICE higher; else withdraw the model."
        ) from error
    except Exception as error:  # onnx and onnxruntime raise a dozen unrelated types here
        if device != "cpu" and gpu_is_full(error):
            raise memory_full(f"graph {digest}: the GPU has no room to load it") from error
        raise ArtefactDamaged(
            f"graph {digest}: onnxruntime cannot load it ({type(error).__name__}); publish the model again"
        ) from error
    *asking, session = sessions
    wanted = {IMAGE, QUERY} if asking else {IMAGE}
    if inputs != wanted or not (OUTPUT in outputs or dropped):
        raise ArtefactDamaged(
            f"graph {digest}: expected an input '{IMAGE}' and an output '{OUTPUT}', "
            f"found {sorted(inputs)} and {sorted(outputs)}; publish the model again"
        )
    # Asked of the session itself: what was wanted is not what one gets.
    provider: str = session.get_providers()[0]
    check_provider(device, provider, refused)
    return Loaded(session, asking[0] if asking else None, outputs, provider)


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
            if gpu_is_full(error) or first == len(providers) - 1:
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
    options.log_severity_level = _FATAL_ONLY
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
