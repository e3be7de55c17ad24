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
    """Choose the GPU that the settings name; for `auto` the first one, or the CPU where there is none.

    Raises:
        AdaptationRejected: the settings require a GPU that is not there.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if settings.device == "cpu" or (settings.device == "auto" and not gpus):
        return torch.device("cpu")
    device = torch.device("cuda" if settings.device == "auto" else settings.device)
    if (device.index or 0) >= gpus:
        raise AdaptationRejected(
            f"LOCUM_DEVICE={settings.device}, but the worker's torch finds {gpus or 'no'} GPU: run the "
            "worker where it is, or set LOCUM_DEVICE=auto"
        )
    return device
