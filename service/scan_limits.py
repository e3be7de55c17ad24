"""What one scan may cost, as the settings say it."""

from __future__ import annotations

from model_store.scan import Limits
from service.settings import Settings


def scan_limits(settings: Settings) -> Limits:
    """For decoding, in the API and in the worker alike."""
    return Limits(
        max_bytes=settings.max_upload_bytes,
        max_pixels=settings.max_pixels,
        max_voxels=settings.max_voxels,
        max_decompressed=settings.max_decompressed_bytes,
    )
