"""Maps of how unsure a network is of each pixel, and the attention of a scan over its slices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# The smallest probability distinguished from 0; x log x is below 2e-6 there.
_FLOOR = np.float32(1e-7)


def entropy(probabilities_K: NDArray[np.floating]) -> float:
    """Normalised entropy of one distribution: -sum_k p_k log p_k / log K, from 0 (certain) to 1 (no idea)."""
    p = np.maximum(probabilities_K.astype(np.float64), _FLOOR)
    value = -float((p * np.log(p)).sum()) / float(np.log(len(p)))
    return min(1.0, max(0.0, value))


def entropy_map(probabilities_KHW: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same of every pixel's distribution, [H, W]."""
    p = np.maximum(probabilities_KHW, _FLOOR)
    found: NDArray[np.float32] = -np.einsum("khw,khw->hw", p, np.log(p)) / np.float32(np.log(len(p)))
    return found


def region_entropy_map(probabilities_KHW: NDArray[np.float32]) -> NDArray[np.float32]:
    """The mean over regions of the normalised entropy of each one's probability, [H, W]."""
    p = np.clip(probabilities_KHW, _FLOOR, 1 - _FLOOR)
    entropies = -(p * np.log(p) + (1 - p) * np.log1p(-p))
    return np.asarray(entropies.mean(axis=0) / np.log(2), np.float32)


# Tolerance of the sum of a slice's shares, from 1: float32, and half precision on a GPU.
_TOLERANCE = 0.01


class Attention:
    """The mean over a scan's slices of the shares that its graph gives [S, sources]; they add up to 1.

    `sources` are a manifest's: `own`, which is the slice itself, then the federation's sites. None: the graph
    has none, and there is nothing to add.
    """

    def __init__(self, sources: Sequence[str] | None) -> None:
        self._sources = sources
        self._total = np.zeros(len(sources or ()))
        self._slices = 0

    def add(self, shares: NDArray[np.float32] | None) -> None:
        """Take the next slices'. Raises ValueError for what are no shares of these sources."""
        if self._sources is None:
            return
        if shares is None or shares.ndim != 2 or shares.shape[1] != len(self._sources):
            found = "none" if shares is None else list(shares.shape)
            raise ValueError(f"expected attention [S, {len(self._sources)}], found {found}")
        # A NaN is in no range.
        if not (shares >= 0).all() or not (abs(shares.sum(axis=1) - 1) <= _TOLERANCE).all():
            raise ValueError("expected attention of shares that add up to 1, found others")
        self._total += shares.sum(axis=0, dtype=np.float64)
        self._slices += len(shares)

    @property
    def shares(self) -> dict[str, float] | None:
        """By source, over everything added so far."""
        if self._sources is None or not self._slices:
            return None
        return dict(zip(self._sources, (self._total / self._slices).tolist(), strict=True))
