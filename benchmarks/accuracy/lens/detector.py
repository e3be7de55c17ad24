"""A second simulator of scanners, which shares neither code nor numbers with the others.

A hospital's detector: shading from one side, the characteristic curve of a film (Hurter and Driffield, 1890),
a point spread of a sharp and a wide part, and Poisson noise of a number of quanta.

Legend: H rows, W columns, C channels or slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from model_store.scan import Scan
from personalization.seeds import seed_of

_HEEL = (0.15, 0.45)  # how much darker the far side is
_CONTRAST = (0.7, 1.8)  # gamma of the film, the slope of its curve
_SPEED = (-0.5, 0.5)  # logarithm of the exposure at the middle of the curve
_SHARP, _WIDE = (0.002, 0.008), 0.03  # deviations of the point spread, as shares of the longer side
_VEIL = (0.1, 0.35)  # share of the wide part
_QUANTA = (100.0, 2000.0)  # of the brightest pixel
_FOG = 0.05  # of the exposure, so that its logarithm is finite


@dataclass(frozen=True)
class Detector:
    """One hospital's detector."""

    angle: float
    heel: float
    contrast: float
    speed: float
    sharp: float
    veil: float
    quanta: float
    seed: int

    @classmethod
    def of(cls, site: str, seed: int) -> Detector:
        """That of a hospital for a seed."""
        drawn = np.random.default_rng(seed_of(seed, "detector", site))
        angle = drawn.uniform(0, 2 * np.pi)
        heel, contrast, speed, sharp, veil = (
            float(drawn.uniform(*of)) for of in (_HEEL, _CONTRAST, _SPEED, _SHARP, _VEIL)
        )
        quanta = float(np.exp(drawn.uniform(*np.log(_QUANTA))))
        noise = int(drawn.integers(2**31))
        return cls(float(angle), heel, contrast, speed, sharp, veil, quanta, noise)

    def change(self) -> Callable[[Scan], Scan]:
        """What changes a scan; the noise is drawn afresh for every scan."""
        noise = np.random.default_rng(self.seed)

        def changed(scan: Scan) -> Scan:
            voxels: NDArray[Any] = np.asarray(scan.voxels, dtype=np.float64)
            low, span = voxels.min(), max(float(np.ptp(voxels)), 1e-6)
            seen = self.seen((voxels - low) / span, noise) * span + low
            return replace(scan, voxels=seen.astype(np.float32))

        return changed

    def seen(self, slices_HWC: NDArray[np.float64], noise: np.random.Generator) -> NDArray[np.float64]:
        """Slices of 0..1 as the detector shows them."""
        rows, columns = (np.linspace(-1, 1, side) for side in slices_HWC.shape[:2])
        side = (np.cos(self.angle) * rows[:, None] + np.sin(self.angle) * columns) / np.sqrt(2)
        exposure = (slices_HWC + _FOG) * (1 - self.heel * (1 + side) / 2)[..., None]
        longer = max(slices_HWC.shape[:2])
        near, far = (
            ndimage.gaussian_filter(exposure, (width * longer, width * longer, 0))
            for width in (self.sharp, _WIDE)
        )
        exposure = (1 - self.veil) * near + self.veil * far
        exposure = noise.poisson(np.maximum(exposure, 0) * self.quanta) / self.quanta
        # Around the exposure of a middle grey.
        logarithm = np.log((exposure + _FOG / 10) / 0.4) - self.speed
        found: NDArray[np.float64] = 1 / (1 + np.exp(-2 * self.contrast * logarithm))
        return found
