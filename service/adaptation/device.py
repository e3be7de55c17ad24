"""Where and on how many cores torch works in a worker."""

from __future__ import annotations

import torch

from service.settings import Settings


def prepare_torch(settings: Settings) -> None:
    """Set torch up as the settings say; equal jobs give equal results afterwards."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False


def device_of(settings: Settings) -> torch.device:
    """A GPU where there is one and the settings allow it."""
    return torch.device("cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu")
