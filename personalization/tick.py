"""How long computations are asked, between batches, whether to go on."""

from __future__ import annotations

from collections.abc import Callable

# It may raise: what was asked for has been called off.
Tick = Callable[[], None]


def no_tick() -> None:
    """For who has nobody to ask."""
