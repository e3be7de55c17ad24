"""Where and on how many cores torch works in a worker."""

from __future__ import annotations

import torch

from service.errors import AdaptationRejected
from service.settings import Settings


def prepare_torch(settings: Settings) -> None:
    """Set torch up as the settings say; equal jobs give equal results afterwards."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False


def device_of(settings: Settings) -> torch.device:
    """A GPU where there is one and it is allowed. Raises AdaptationRefused where it is demanded in vain."""
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
