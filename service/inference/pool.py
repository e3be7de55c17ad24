"""The entries of a pool that a scan picked (FedIns), and their similarities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.inference.sessions import Outputs

# A volume's slices pick together, by the mean of their queries, or each for itself.
PickUnit = Literal["scan", "slice"]
# The largest cosine, with rounding: float32, and half precision on a GPU.
_LARGEST = 1.01


class PoolPick(NamedTuple):
    """The entries, the most similar first, and the cosine of each key with the query."""

    entries: tuple[int, ...]
    similarities: tuple[float, ...]


class Picks:
    """Collects the picks of a scan; `once` where all its slices picked together."""

    def __init__(self, *, once: bool) -> None:
        self._once = once
        self._rows: list[PoolPick] = []

    def add(self, outputs: Outputs) -> None:
        """Take the next slices'. Raises ValueError for similarities that are no cosines of these entries."""
        if outputs.entries is None or (self._once and self._rows):
            return
        entries, similarities = outputs.entries, outputs.similarities
        fits = similarities is not None and similarities.shape == entries.shape
        # A NaN is in no range.
        if similarities is None or not fits or not (abs(similarities) <= _LARGEST).all():
            raise ValueError(f"expected a similarity in -1..1 for each entry {list(entries.shape)}")
        rows = [
            PoolPick(tuple(row), tuple(values))
            for row, values in zip(entries.tolist(), similarities.tolist(), strict=True)
        ]
        self._rows += rows[:1] if self._once else rows

    @property
    def picked(self) -> tuple[PoolPick, ...] | None:
        """One for the scan, or one for each slice in order; None of a network without a pool."""
        return tuple(self._rows) or None


def shares(picked: Sequence[PoolPick], entries: int) -> NDArray[np.float64]:
    """[entries]: how a scan's picks spread, adding up to 1, whether it picked once or slice by slice."""
    counts = np.bincount([entry for each in picked for entry in each.entries], minlength=entries)
    return np.asarray(counts / counts.sum(), np.float64)
