"""The providers of onnxruntime: which are asked for on a device, which answers, and when a GPU is full."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime

from service.errors import GpuMemoryFull, GpuUnavailable

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
# The value of LOCUM_DEVICE.
_OPENVINO = "openvino"

_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/nvidia0"), Path("/dev/dxg"))
_log = logging.getLogger("locum.service")
FALLBACK = (
    "this machine has an NVIDIA device, and onnxruntime cannot use it: scans are answered on the CPU; "
    "`python -m service doctor` says why; LOCUM_DEVICE=cuda refuses to start instead, cpu accepts it"
)
# In the message of onnxruntime's arenas.
OUT_OF_MEMORY = "is smaller than requested bytes"
# CUDA and its libraries say it in errors of several types.
_GPU_OUT_OF_MEMORY = (
    *("out of memory", "OUT_OF_MEMORY", "STATUS_ALLOC_FAILED", "Failed to allocate memory"),
    # cuBLAS, which a network's first run starts.
    "the resource allocation failed",
    OUT_OF_MEMORY,
)
_GPU_RETRY_SECONDS = 10


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


def is_gpu(provider: str) -> bool:
    """Whether a provider computes on a GPU."""
    return provider in (CUDA, TENSORRT)


def check_provider(device: str, provider: str, refused: Exception | None) -> None:
    """Raise GpuUnavailable if `device` names what the `provider` that answers is not.

    `refused` is what an earlier provider failed with. Warns once of the CPU where a GPU is to be seen.
    """
    if device == _OPENVINO and provider != OPENVINO:
        raise GpuUnavailable(
            "LOCUM_DEVICE=openvino, but this onnxruntime has no OpenVINO: install onnxruntime-openvino "
            "in place of onnxruntime-gpu, or set LOCUM_DEVICE=cpu."
        )
    if device.startswith("cuda") and not is_gpu(provider):
        raise GpuUnavailable(
            f"LOCUM_DEVICE={device}, but onnxruntime cannot use it here{_in_words(refused)}; see the "
            "service's log, or set LOCUM_DEVICE=auto."
        )
    _warn_of_fallback(device, provider, _in_words(refused))


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


def gpu_is_full(error: Exception) -> bool:
    """Whether CUDA, a library of it or an arena has no memory left."""
    return any(words in str(error) for words in _GPU_OUT_OF_MEMORY)


def memory_full(what: str) -> GpuMemoryFull:
    """The error of a GPU without room; `what` says for what."""
    return GpuMemoryFull(
        f"{what}, which other networks, workers or programs use: send it again in {_GPU_RETRY_SECONDS} s; "
        "the operator can lower LOCUM_SESSION_CACHE, bound the workers by LOCUM_GPU_MEMORY_BYTES, or serve "
        "with LOCUM_DEVICE=cpu.",
        headers={"Retry-After": str(_GPU_RETRY_SECONDS)},
        retry_after=_GPU_RETRY_SECONDS,
    )
