"""Fit a lens to one scan, as it comes: a cohort of one patient.

No person looks at it before it answers. So it is used only where the scan shows what the members' scans show,
by the limits of the gate of a hospital's lens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from model_store.lens.features import Images
from model_store.lens.fingerprint import Fingerprint
from model_store.lens.fit import fit
from model_store.lens.lens import Lens
from model_store.preprocessing import Prepared, PreparedVolume

# Those of `personalization.gate.lens`, for the same reasons.
LEAST_GRID: Final = 0.25
LEAST_SIDES: Final = 1.25
# Slices that a lens is fitted to, evenly spaced.
_MOST_SLICES: Final = 32


@dataclass(frozen=True)
class OfScan:
    """What one scan asks for: its lens, None where it stays as it is; `refused`, if that is why."""

    lens: Lens | None
    refused: bool = False


@dataclass(frozen=True)
class LensForScan:
    """The lens of a scan that is still to come, by the fingerprint of what its network was trained on."""

    fingerprint: Fingerprint

    def of(self, prepared: Prepared | PreparedVolume) -> OfScan:
        """Fit it. Deterministic. Raises ValueError for a fingerprint of other images."""
        return self.of_images(images_of(prepared))

    def of_images(self, images: Images) -> OfScan:
        """`of`, for the images [N, C, ...] of a scan as its network meets them: its slices, or one volume."""
        made = fit(lambda: [(0, images)], self.fingerprint)
        if made is None or not made.lens.steps:
            return OfScan(None)
        grid, sides = made.grid, made.sides
        shows = (grid is None or grid >= LEAST_GRID) and (sides is None or sides >= LEAST_SIDES)
        fits = shows and made.left <= 1
        return OfScan(made.lens) if fits else OfScan(None, refused=True)


def images_of(prepared: Prepared | PreparedVolume) -> Images:
    """The images [N, C, ...] that stand for a scan: its one volume, or at most 32 of its slices."""
    if isinstance(prepared, PreparedVolume):
        return prepared.volume[np.newaxis]
    return prepared.slices[:: -(-len(prepared.slices) // _MOST_SLICES)]
