"""What answers of every kind say about Locum: its version, and the notice on its use."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

NOTICE: Final = "research use only"


@cache
def locum_version() -> str:
    """The installed version, of Locum or of its service alone."""
    for distribution in ("locum", "locum-serve"):
        with suppress(PackageNotFoundError):
            return version(distribution)
    return "0+unknown"
