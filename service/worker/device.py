"""Device, memory and threads of torch in a worker.

    device_of(settings)   where jobs compute
    check_gpu(settings)   a kernel runs there; before every claim
    release()             gives memory back, between jobs and before onnxruntime needs it

A CUDA error such as an illegal access stays: every later call of the process fails too. So a process ends
when its GPU does not answer, and leaves its job as a killed one would: the lease expires, and another attempt
follows.
"""

from __future__ import annotations

import gc
import json
import logging
import re
import sys
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from service.errors import GpuUnusable
from service.inference.gpu import card_and_driver
from service.inference.providers import cuda_device_seen
from service.inference.sessions import probe_provider
from service.settings import Settings, settings_or_exit

_log = logging.getLogger("locum.worker")

_GIB = 2**30


def prepare_torch(settings: Settings) -> None:
    """Configure torch by the settings, so that equal jobs give equal results."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.backends.cudnn.benchmark = False
    # cuDNN's gradients by atomic additions have another sum in every run.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    if settings.gpu_memory_bytes and torch.cuda.is_available():
        device = device_of(settings)
        if device.type == "cuda":
            total, card = torch.cuda.mem_get_info(device)[1], device.index or 0
            torch.cuda.set_per_process_memory_fraction(min(1.0, settings.gpu_memory_bytes / total), card)


def device_of(settings: Settings) -> torch.device:
    """Choose the GPU that the settings name; for `auto` the first one, or the CPU where none can be used.

    Raises:
        GpuUnusable: the settings require a GPU that is not there, or that this build of torch cannot use.
    """
    if settings.device in ("cpu", "openvino"):
        return torch.device("cpu")
    device = torch.device("cuda" if settings.device == "auto" else settings.device)
    problem = _problem(device.index or 0)
    if problem is None:
        return device
    if settings.device == "auto":
        _warn_once(problem)
        return torch.device("cpu")
    raise GpuUnusable(
        f"LOCUM_DEVICE={settings.device}, but the worker's torch finds {problem}: run the worker where it "
        "is, or set LOCUM_DEVICE=auto"
    )


def check_gpu(settings: Settings) -> torch.device:
    """Run a kernel on the device of jobs, and wait for its answer.

    Raises:
        GpuUnusable: no device, or it does not answer.
    """
    device = device_of(settings)
    if device.type == "cuda":
        try:
            torch.ones(2, device=device).sum().item()
        except RuntimeError as error:
            raise GpuUnusable(f"the GPU {device} does not answer: {_first_line(error)}") from error
    return device


def words_of_memory(error: BaseException, scans: int | None, device: torch.device) -> str:
    """Say how much was needed and there, and about how many of so many scans would fit."""
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.max_memory_allocated(device)
    room = torch.cuda.memory_reserved(device) + free
    asked = re.search(r"Tried to allocate ([0-9.]+) ([KMG])iB", str(error))
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    needed = used + (float(asked[1]) * units[asked[2]] if asked else 0)
    words = (
        f"the GPU has too little memory: at least {needed / _GIB:.1f} GiB were needed, and this worker can "
        f"have {room / _GIB:.1f} of its {total / _GIB:.1f} GiB"
    )
    if scans and scans > 1 and needed > room:
        fits = max(1, int(scans * room / needed))
        return f"{words}; of these {scans} scans, about {min(fits, scans - 1)} would fit: send fewer"
    return f"{words}; end what else uses the card, or run a worker with LOCUM_DEVICE=cpu"


def release() -> None:
    """Give back the GPU memory that torch keeps for later: the API, or onnxruntime here, may need it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        # A GPU that does not answer keeps what it has; the process ends.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def facts(device: torch.device) -> dict[str, Any]:
    """Where something was computed, for a job's result: of a GPU also card, driver and libraries."""
    found: dict[str, Any] = {"device": str(device), "torch": torch.__version__}
    if device.type == "cuda":
        known = card_and_driver(str(device))
        found |= {
            "card": torch.cuda.get_device_name(device),
            "driver": known and known[1],
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return found


def _problem(index: int) -> str | None:
    """What keeps torch from using GPU `index`, as the end of a sentence; None if nothing does."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= gpus:
        if not gpus and cuda_device_seen():
            return (
                f"no GPU, though this machine has an NVIDIA device: torch {torch.__version__} "
                + (
                    f"is built for CUDA {torch.version.cuda}, which may need a newer driver"
                    if torch.version.cuda
                    else "is built without CUDA"
                )
                + " (`nvidia-smi` says what the driver has)"
            )
        return f"{gpus or 'no'} GPU"
    major, minor = torch.cuda.get_device_capability(index)
    if not _runs_on(major, minor, torch.cuda.get_arch_list()):
        return (
            f"a {torch.cuda.get_device_name(index)} of compute capability {major}.{minor}, which torch "
            f"{torch.__version__} for CUDA {torch.version.cuda} has no kernels for (it has "
            f"{', '.join(torch.cuda.get_arch_list())})"
        )
    return None


def _runs_on(major: int, minor: int, built_for: list[str]) -> bool:
    """Whether machine code (sm_) of the same generation, or code to compile (compute_), serves a card."""
    for name in built_for:
        kind, _, number = name.partition("_")
        digits = re.match(r"[0-9]+", number)
        if digits is None:
            continue
        of = divmod(int(digits[0]), 10)
        if kind == "sm" and of[0] == major and of[1] <= minor:
            return True
        if kind == "compute" and of <= (major, minor):
            return True
    # A build that does not say what it has is tried.
    return not built_for


@cache
def _warn_once(problem: str) -> None:
    if cuda_device_seen():
        _log.warning("LOCUM_DEVICE=auto: jobs run on the CPU, because torch finds %s", problem)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def main() -> None:
    """Print where jobs would compute, as JSON; exit with 1 and the reason where they cannot.

    Run by a worker before it takes its first job: in a process of its own, since a process that has used CUDA
    cannot fork.
    """
    settings = settings_or_exit({})
    try:
        found = facts(check_gpu(settings))
        found["provider"] = probe_provider(settings.device)
    except Exception as error:  # whatever it is, jobs cannot run
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
