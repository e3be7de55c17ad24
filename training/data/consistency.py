"""What the sites of a federation hold, side by side: masks of each label, intensities, spacing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from model_store.appearance import percentiles
from model_store.preprocessing.slices import thinned
from model_store.scan import Scan

_SAMPLES = 2**14
# Ratio of the widths of two sites' intensities, beyond what MR scanners differ by; a shift, as a share of a
# width: CT is stored with and without its offset of 1024.
_WIDER = 8.0
_SHIFTED = 0.5


@dataclass(frozen=True)
class Seen:
    """Raw intensities (1st, 50th and 99th percentile) and spacing in mm of a scan, or medians of a site's.

    `spacing` is empty of an image.
    """

    intensities: tuple[float, float, float]
    spacing: tuple[float, ...] = ()

    @classmethod
    def of(cls, scan: Scan) -> Seen:
        """What is seen of a scan."""
        low, middle, high = percentiles(thinned(scan.voxels, _SAMPLES), (1, 50, 99))
        if scan.affine is None:
            return cls((low, middle, high))
        lengths = np.linalg.norm(scan.affine[:3, :3], axis=0) * scan.mm_per_unit
        return cls((low, middle, high), tuple(round(float(each), 3) for each in lengths))

    @classmethod
    def together(cls, scans: Iterable[Seen]) -> Seen | None:
        """The medians; None of no scan."""
        found = list(scans)
        if not found:
            return None
        low, middle, high = (
            float(median(each)) for each in zip(*(s.intensities for s in found), strict=True)
        )
        placed = [scan.spacing for scan in found if scan.spacing]
        spacing = tuple(float(median(axis)) for axis in zip(*placed, strict=True))
        return cls((low, middle, high), spacing)

    @property
    def width(self) -> float:
        """From the 1st to the 99th percentile."""
        return self.intensities[2] - self.intensities[0]


def other_units(site: str, own: Seen, others: Sequence[Seen]) -> str | None:
    """Say that a site's intensities are in other units than most of the others'; None where they are not."""
    unlike = [other for other in others if _are_unlike(own, other)]
    if 2 * len(unlike) <= len(others):
        return None
    low, _, high = (median(each) for each in zip(*(other.intensities for other in unlike), strict=True))
    return (
        f"site '{site}': intensities run from {own.intensities[0]:.4g} to {own.intensities[2]:.4g} (1st to "
        "99th percentile, median of its scans), those of the other sites from "
        f"{low:.4g} to {high:.4g}: these are not the same units, or an export clipped them; take all in the "
        "scanner's units, or leave the site out"
    )


def _are_unlike(one: Seen, other: Seen) -> bool:
    wide, narrow = max(one.width, other.width), min(one.width, other.width)
    return wide > _WIDER * narrow or abs(one.intensities[0] - other.intensities[0]) > _SHIFTED * wide
