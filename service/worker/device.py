"""Device and threads of torch in a worker."""

from __future__ import annotations

import torch

from service.errors import AdaptationRejected
from service.settings import Settings


def prepare_torch(settings: Settings) -> None:
    """Configure torch by the settings, so that equal jobs give equal results."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False


def device_of(settings: Settings) -> torch.device:
    """Choose a GPU if there is one and the settings allow it, else the CPU.

    Raises:
        AdaptationRejected: the settings require a GPU and there is none.
    """
    if settings.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if settings.device == "cuda":
        raise AdaptationRejected(
            "LOCUM_DEVICE=cuda, but the worker's torch finds no GPU: run the worker where there is one, or "
            "set LOCUM_DEVICE=auto"
        )
    return torch.device("cpu")
