"""The number that the service gave for an answer's uncertainty until it gave a confidence by label."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.inference.uncertainty import entropy_map, region_entropy_map


class Entropy:
    """Mean normalised entropy of the class probabilities, weighted by the probability of foreground. 0 to 1.

        u = sum_x w(x) H(x) / sum_x w(x),   H(x) = -sum_k p_k(x) log p_k(x) / log K,   w(x) = 1 - p_0(x)

    over all pixels at network resolution, class 0 being the background. Weighting looks where there is, or
    may be, something to segment: a plain mean would say mostly how large the background is. 0: every
    foreground pixel is certain; 1: nothing is known. Defined, and continuous, for an empty mask too.

    With `regions`, the outputs are probabilities of labels that may overlap: H is the mean of their
    entropies, and w the largest of them.
    """

    def __init__(self, *, regions: bool = False) -> None:
        self._regions = regions
        self._weighted = 0.0
        self._weight = 0.0

    def add(self, probabilities_SKHW: NDArray[np.float32]) -> None:
        """Take the probabilities of the next slices."""
        for probabilities_KHW in probabilities_SKHW:
            if self._regions:
                entropy_HW = region_entropy_map(probabilities_KHW)
                foreground_HW = probabilities_KHW.max(axis=0)
            else:
                entropy_HW = entropy_map(probabilities_KHW)
                foreground_HW = 1.0 - np.maximum(probabilities_KHW[0], 1e-7)
            # No dot product: BLAS shares it among threads, which cost more than they save.
            self._weighted += float((foreground_HW * entropy_HW).sum(dtype=np.float64))
            self._weight += float(foreground_HW.sum(dtype=np.float64))

    @property
    def value(self) -> float:
        """Over everything added so far; 0 before."""
        return min(1.0, max(0.0, self._weighted / self._weight)) if self._weight > 0 else 0.0
