"""How long computations are asked, between batches, whether to go on."""

from __future__ import annotations

from collections.abc import Callable

# It may raise: what was asked for has been called off.
CancelCheck = Callable[[], None]


def never_cancelled() -> None:
    """For who has nobody to ask."""
