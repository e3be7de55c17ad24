"""Devices of a run's steps: whether one is there, and how worker processes share the cards of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# What a worker process takes at least: libraries, one site's data and a batch; on a GPU a context of CUDA.
_BYTES_ON_CPU = 2**30
_BYTES_ON_GPU = 2 * 2**30
_MEMORY = Path("/proc/meminfo")


def problem_of(device: str) -> str | None:
    """Say what keeps this process from `device` (cpu, cuda or cuda:N); None if nothing does."""
    if device == "cpu":
        return None
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (torch.device(device).index or 0) < cards:
        return None
    found = f"{cards} CUDA device(s)" if cards else "no CUDA device"
    build = torch.version.cuda or "no CUDA"
    return f"device: {device} is not there: torch {torch.__version__}, built for {build}, finds {found}"


def fault_of(device: str) -> str | None:
    """Ask a device for a real operation, and say why it does not compute; None if it does.

    A card that torch has no code for, or that a host took from a container, is counted all the same.
    """
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError as error:
        return f"device: {device} does not compute: {str(error).splitlines()[0]}"
    return None


def device_of_worker(device: str, worker: int) -> str:
    """The device of a worker process, by its number: with `cuda`, workers take the machine's cards in turn.

    Equal cards give equal results, so it does not matter which site is on which.
    """
    if device != "cuda":
        return device
    cards = torch.cuda.device_count()
    return f"cuda:{worker % cards}" if cards > 1 else device


def default_workers(device: str) -> int:
    """As many worker processes as there are cores, if the memory of `device` is enough for so many."""
    least = _BYTES_ON_CPU if device == "cpu" else _BYTES_ON_GPU
    return max(1, min(os.cpu_count() or 1, free_memory(device) // least))


def free_memory(device: str) -> int:
    """Bytes that are free on a device; with `cuda`, on all cards of the machine together."""
    if device != "cpu":
        cards = range(torch.cuda.device_count()) if device == "cuda" else [torch.device(device).index]
        return sum(torch.cuda.mem_get_info(card)[0] for card in cards)
    if _MEMORY.exists():
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 2**10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
