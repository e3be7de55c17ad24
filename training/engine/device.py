"""Devices of a run's steps: whether one is there, and how worker processes share the cards of a machine."""

from __future__ import annotations

import torch


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


def device_of_worker(device: str, worker: int) -> str:
    """The device of a worker process, by its number: with `cuda`, workers take the machine's cards in turn.

    Equal cards give equal results, so it does not matter which site is on which.
    """
    if device != "cuda":
        return device
    cards = torch.cuda.device_count()
    return f"cuda:{worker % cards}" if cards > 1 else device
