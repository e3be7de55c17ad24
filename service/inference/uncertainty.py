"""How sure the network was, as one number per scan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# The smallest probability told apart from 0; x log x is below 2e-6 there.
_FLOOR = np.float32(1e-7)


def uncertainty(probabilities_SKHW: NDArray[np.float32]) -> float:
    """Mean normalised entropy of the class probabilities, weighted by the probability of foreground. 0 to 1.

        u = sum_x w(x) H(x) / sum_x w(x),   H(x) = -sum_k p_k(x) log p_k(x) / log K,   w(x) = 1 - p_0(x)

    over all pixels at network resolution. Weighting looks where there is, or may be, something to segment:
    a plain mean would say mostly how large the background is. 0: every foreground pixel is certain;
    1: nothing is known. Continuous also where the mask is empty.

    Args:
        probabilities_SKHW: class probabilities, class 0 being the background.
    """
    classes = probabilities_SKHW.shape[1]
    total = weight = 0.0
    # Slice by slice: the logarithms of a whole volume would double its memory.
    for probabilities_KHW in probabilities_SKHW:
        p = np.maximum(probabilities_KHW, _FLOOR)
        entropy_HW = -np.einsum("khw,khw->hw", p, np.log(p))
        foreground_HW = 1.0 - p[0]
        total += float(np.vdot(foreground_HW, entropy_HW))
        weight += float(foreground_HW.sum(dtype=np.float64))
    if weight <= 0.0:
        return 0.0
    return float(np.clip(total / weight / np.log(classes), 0.0, 1.0))
