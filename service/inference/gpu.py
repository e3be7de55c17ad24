"""Name an NVIDIA card, its driver and the libraries that compute on it, without torch.

Card and driver are known to the driver's library (NVML), which needs no CUDA.
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import cache
from pathlib import Path

_LIBRARY = "libnvidia-ml.so.1"
_LENGTH = 96
_MAPS = Path("/proc/self/maps")


@cache
def card(device: str) -> str | None:
    """Such as `NVIDIA A100-PCIE-40GB, driver 580.65.06, CUDA 13.0, cuDNN 9.20.0`; None where NVML is silent.

    `device` is `cuda` or `cuda:N`, as LOCUM_DEVICE. Called after a network was loaded there: the libraries
    are those that this process has loaded.
    """
    known = card_and_driver(device)
    return known and ", ".join((known[0], f"driver {known[1]}", *_libraries()))


@cache
def card_and_driver(device: str) -> tuple[str, str] | None:
    """The name of a card and the version of its driver; None where NVML does not say."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        if library.nvmlInit_v2():
            return None
        try:
            return _ask(library, int(device.partition(":")[2] or 0))
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError, ValueError, IndexError):
        return None


def _ask(library: ctypes.CDLL, index: int) -> tuple[str, str] | None:
    # CUDA numbers the cards that a process may see; NVML numbers all.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = visible.split(",")[index].strip() if visible else str(index)
    handle = ctypes.c_void_p()
    if named.isdigit():
        failed = library.nvmlDeviceGetHandleByIndex_v2(int(named), ctypes.byref(handle))
    else:
        failed = library.nvmlDeviceGetHandleByUUID(named.encode(), ctypes.byref(handle))
    name, driver = ctypes.create_string_buffer(_LENGTH), ctypes.create_string_buffer(_LENGTH)
    if (
        failed
        or library.nvmlDeviceGetName(handle, name, _LENGTH)
        or library.nvmlSystemGetDriverVersion(driver, _LENGTH)
    ):
        return None
    return name.value.decode(), driver.value.decode()


def _libraries() -> list[str]:
    """Versions of CUDA's runtime and of cuDNN, where this process has loaded them."""
    found = []
    try:
        if (runtime := _loaded("cudart")) is not None:
            number = ctypes.c_int()
            if not runtime.cudaRuntimeGetVersion(ctypes.byref(number)):
                found.append(f"CUDA {number.value // 1000}.{number.value % 1000 // 10}")
        if (cudnn := _loaded("cudnn")) is not None:
            cudnn.cudnnGetVersion.restype = ctypes.c_size_t
            version = cudnn.cudnnGetVersion()
            found.append(f"cuDNN {version // 10_000}.{version // 100 % 100}.{version % 100}")
    except (OSError, AttributeError):
        pass  # a library that does not say
    return found


def _loaded(name: str) -> ctypes.CDLL | None:
    """The library of this name, with the version in its file's name, that is in this process already."""
    try:
        path = re.search(rf"/\S*/lib{name}\.so\.\d\S*", _MAPS.read_text())
    except OSError:
        return None
    return ctypes.CDLL(path[0]) if path else None
