"""The shift ladder: a hospital's images through a drawn scanner of MONAI's transforms, at a severity.

Members practise through `personalization.scanner`, which shares neither code nor numbers with this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from model_store.scan import Scan
from personalization.seeds import seed_of

SEVERITIES = (0, 1, 2, 3)
# Of severity 1.
_FIELD = 0.15  # largest coefficient of the bias field's polynomial
_GAMMA = 0.25  # logarithm of gamma
_BLUR = 0.004  # standard deviation of the blur, as a share of the image's longer side
_ZOOM = 0.5  # the resolution falls to 1 / (1 + _ZOOM)
_GIBBS = 0.2  # MONAI's alpha
_SPIKE = 0.02  # amplitude of the stripes, as a share of the image's range
# Share of the scanners that invert, from severity 3 on.
_INVERTED = 0.25


@dataclass(frozen=True)
class ShiftedScanner:
    """One hospital's scanner: the same at every severity, which only turns it up.

    `brighter` is the sign of the logarithm of gamma, `spike` the place of the spike in k-space, from the
    centre, as shares of rows and columns.
    """

    field_seed: int
    brighter: Literal[-1, 1]
    sharpness: Literal["blur", "resolution"]
    artefact: Literal["gibbs", "spike"]
    spike: tuple[float, float]
    inverts: bool

    @classmethod
    def of(cls, site: str, seed: int) -> ShiftedScanner:
        """The scanner of a hospital for a seed."""
        drawn = np.random.default_rng(seed_of(seed, "shift ladder", site))
        return cls(
            int(drawn.integers(2**31)),
            -1 if drawn.random() < 0.5 else 1,
            "blur" if drawn.random() < 0.5 else "resolution",
            "gibbs" if drawn.random() < 0.5 else "spike",
            (float(drawn.uniform(0.03, 0.15)), float(drawn.uniform(0.03, 0.15))),
            bool(drawn.random() < _INVERTED),
        )

    def at(self, severity: int) -> Callable[[Scan], Scan] | None:
        """What changes a scan; None for severity 0."""
        if not severity:
            return None
        return lambda scan: replace(scan, voxels=self._through(np.asarray(scan.voxels), severity))

    def _through(self, voxels_HWC: np.ndarray, severity: int) -> np.ndarray:
        from monai import transforms  # takes seconds to import

        low, high = float(voxels_HWC.min()), float(voxels_HWC.max())
        span = max(high - low, 1e-6)
        image = torch.from_numpy((voxels_HWC.astype(np.float32) - low) / span).permute(2, 0, 1)
        rows, columns = image.shape[1:]
        coefficient = _FIELD * severity
        field = transforms.RandBiasField(3, coeff_range=(-coefficient, coefficient), prob=1.0)
        field.set_random_state(self.field_seed)
        steps = [field, transforms.AdjustContrast(math.exp(self.brighter * _GAMMA * severity))]
        if self.inverts and severity >= 3:
            steps.insert(0, transforms.Lambda(lambda image: 1 - image))
        if self.sharpness == "blur":
            steps.append(transforms.GaussianSmooth(_BLUR * severity * max(rows, columns)))
        else:
            zoom = 1 / (1 + _ZOOM * severity)
            steps.append(
                transforms.RandSimulateLowResolution(1.0, "area", "bilinear", zoom_range=(zoom, zoom))
            )
        if self.artefact == "gibbs":
            steps.append(transforms.GibbsNoise(_GIBBS * severity))
        else:
            place = (
                int(rows * (0.5 + self.spike[0])),
                int(columns * (0.5 + self.spike[1])),
            )
            amplitude = _SPIKE * severity * rows * columns
            channels = [(channel, *place) for channel in range(len(image))]
            steps.append(transforms.KSpaceSpikeNoise(channels, [math.log(amplitude)] * len(image)))
        for step in steps:
            image = step(image)
        seen: np.ndarray = torch.as_tensor(image).permute(1, 2, 0).numpy() * span + low
        return seen
