"""Where onnxruntime may run: CUDA when the machine truly has it, else the CPU.

`onnxruntime.get_available_providers()` says what the wheel was built with, and a session that cannot have
CUDA falls back to the CPU with a page of errors. So CUDA is only tried where an NVIDIA device is to be seen,
and what a session really got is read from the session.
"""

from __future__ import annotations

import contextlib
import io
import logging
from functools import cache
from pathlib import Path
from typing import Any, Literal

import onnxruntime

Device = Literal["auto", "cpu", "cuda"]
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


def wanted_providers(device: Device) -> list[Any]:
    """The providers to ask a session for, in order.

    On CUDA, cuDNN's algorithm search and TF32 are off: both would let equal scans get unequal masks.
    """
    if device == "cpu" or (device == "auto" and not cuda_is_possible()):
        return [CPU]
    cuda_is_possible()
    return [(CUDA, {"cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0"}), CPU]
