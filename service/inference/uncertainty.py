"""How sure the network was, as one number per scan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# The smallest probability told apart from 0; x log x is below 2e-6 there.
_FLOOR = np.float32(1e-7)


def entropy(probabilities_K: NDArray[np.floating]) -> float:
    """Normalised entropy of one distribution: -sum_k p_k log p_k / log K, from 0 (certain) to 1 (no idea)."""
    p = np.maximum(probabilities_K.astype(np.float64), _FLOOR)
    value = -float((p * np.log(p)).sum()) / float(np.log(len(p)))
    return min(1.0, max(0.0, value))


class Uncertainty:
    """Mean normalised entropy of the class probabilities, weighted by the probability of foreground. 0 to 1.

        u = sum_x w(x) H(x) / sum_x w(x),   H(x) = -sum_k p_k(x) log p_k(x) / log K,   w(x) = 1 - p_0(x)

    over all pixels at network resolution, class 0 being the background. Weighting looks where there is, or
    may be, something to segment: a plain mean would say mostly how large the background is. 0: every
    foreground pixel is certain; 1: nothing is known. Defined, and continuous, for an empty mask too.
    """

    def __init__(self) -> None:
        self._weighted = 0.0
        self._weight = 0.0

    def add(self, probabilities_SKHW: NDArray[np.float32]) -> None:
        """Take the probabilities of the next slices."""
        scale = np.log(probabilities_SKHW.shape[1])
        for probabilities_KHW in probabilities_SKHW:
            p = np.maximum(probabilities_KHW, _FLOOR)
            entropy_HW = -np.einsum("khw,khw->hw", p, np.log(p)) / scale
            foreground_HW = 1.0 - p[0]
            # No dot product: BLAS shares it among threads, which cost more than they save.
            self._weighted += float((foreground_HW * entropy_HW).sum(dtype=np.float64))
            self._weight += float(foreground_HW.sum(dtype=np.float64))

    @property
    def value(self) -> float:
        """Over everything added so far; 0 before."""
        return min(1.0, max(0.0, self._weighted / self._weight)) if self._weight > 0 else 0.0
