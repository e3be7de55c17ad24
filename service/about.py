"""What answers of every kind say about Locum: its version, and the notice on its use."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

NOTICE: Final = "research use only"


@cache
def locum_version() -> str:
    """Locum's version."""
    try:
        return version("locum")
    except PackageNotFoundError:
        return "0+unknown"
