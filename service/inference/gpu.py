"""Name an NVIDIA card and its driver by the driver's library (NVML), which needs neither CUDA nor torch."""

from __future__ import annotations

import ctypes
import os
from functools import cache

_LIBRARY = "libnvidia-ml.so.1"
_LENGTH = 96


@cache
def card(device: str) -> str | None:
    """Such as `NVIDIA A100-PCIE-40GB, driver 580.65.06`; None where NVML does not say.

    `device` is `cuda` or `cuda:N`, as LOCUM_DEVICE.
    """
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


def _ask(library: ctypes.CDLL, index: int) -> str | None:
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
    return f"{name.value.decode()}, driver {driver.value.decode()}"
