"""Cancellation callback, called between batches of long computations."""

from __future__ import annotations

from collections.abc import Callable

# It raises to cancel the computation.
CancelCheck = Callable[[], None]


def never_cancelled() -> None:
    """Never cancel: the default."""
