"""Sizes, fragments and agreement of class maps, scan by scan.

Legend: N slices, H and W height and width, S scans, K classes (0 is background).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import ndimage, special

from personalization.errors import LabelError

Maps = NDArray[np.uint8]
Index = NDArray[np.int64]

# A class in a scan smaller than this share of one slice (16 pixels of 128x128) counts as absent.
MIN_COMPONENT = 1e-3
# Any mask may grow to this share of a scan's pixels, however small the parent's masks are.
MIN_GROWTH = 0.02

_MOST_CLASSES = 256


def checked_maps(maps: ArrayLike, what: str, classes: int, like: Maps | None = None) -> Maps:
    """Class indices as [N, H, W] uint8, or [N, ...]. Raises LabelError, naming `what`, for anything else."""
    found = np.asarray(maps)
    if not 2 <= found.ndim <= 4 or not found.size or found.dtype.kind not in "iu":
        raise LabelError(
            f"{what}: expected class indices [N, H, W], found {list(found.shape)} of type {found.dtype}"
        )
    if like is not None and found.shape != like.shape:
        raise LabelError(
            f"{what}: expected shape {list(like.shape)}, as of the candidate, found {list(found.shape)}"
        )
    low, high = int(found.min()), int(found.max())
    if not 2 <= classes <= _MOST_CLASSES or low < 0 or high >= classes:
        raise LabelError(f"{what}: expected classes 0..{classes - 1}, found {low}..{high}")
    return found.astype(np.uint8, copy=False)


def checked_index(scan_index: ArrayLike, slices: int) -> Index:
    """Each slice's scan as 0..S-1 [N]. Raises LabelError unless there is one whole number per slice."""
    found = np.asarray(scan_index)
    if found.shape != (slices,) or found.dtype.kind not in "iu":
        raise LabelError(
            f"scan_index: expected one whole number per slice ({slices}), "
            f"found {list(found.shape)} of type {found.dtype}"
        )
    return np.unique(found, return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True)
class Comparison:
    """Pixels of each scan by class in two sets of maps: `counts` [S, K, K], first and second set's class.

    `slice_pixels` is H W. Sizes are in units of it, so that a target counts the same in a thick stack of
    slices as in one of them.
    """

    counts: NDArray[np.int64]
    slice_pixels: int

    @classmethod
    def of(cls, first: Maps, second: Maps, scan_index: Index, classes: int) -> Comparison:
        """Count them, slice by slice: no array of all slices is made."""
        counts = np.zeros((int(scan_index.max()) + 1, classes * classes), dtype=np.int64)
        for scan, one, other in zip(scan_index, first, second, strict=True):
            pairs = one.ravel().astype(np.int64) * classes + other.ravel()
            counts[scan] += np.bincount(pairs, minlength=classes * classes)
        return cls(counts.reshape(-1, classes, classes), first[0].size)

    @property
    def first(self) -> NDArray[np.float64]:
        """How many slices' worth each class has in each scan of the first set, [S, K]."""
        sizes: NDArray[np.float64] = self.counts.sum(axis=2) / self.slice_pixels
        return sizes

    @property
    def second(self) -> NDArray[np.float64]:
        """The same in the second set."""
        sizes: NDArray[np.float64] = self.counts.sum(axis=1) / self.slice_pixels
        return sizes

    def agreement(self, min_size: float) -> NDArray[np.float64]:
        """Dice of the two sets in every scan [S]: the mean over its foreground classes.

        A class that is smaller than `min_size` (of one slice) in both sets is left out; NaN where all are,
        that is, where both sets find the scan empty.
        """
        overlap = np.diagonal(self.counts, axis1=1, axis2=2)[:, 1:] / self.slice_pixels
        first, second = self.first[:, 1:], self.second[:, 1:]
        present = np.maximum(first, second) >= min_size
        total = np.where(present, first + second, 1.0)
        dice = np.where(present, 2 * overlap / total, 0.0)
        number = present.sum(axis=1)
        return np.where(number > 0, dice.sum(axis=1) / np.maximum(number, 1), np.nan)


def mean_agreement(first: Maps, second: Maps, scan_index: Index, classes: int, min_size: float) -> float:
    """Mean over the scans in which either set finds anything; 1 if both find all of them empty."""
    values = Comparison.of(first, second, scan_index, classes).agreement(min_size)
    return float(np.nanmean(values)) if not np.isnan(values).all() else 1.0


def agreement_gain(
    candidate: Maps, parent: Maps, reference: Maps, scan_index: Index, classes: int, min_size: float
) -> float | None:
    """At least how much better the candidate agrees with the reference than its parent does, 95 % sure.

    The one-sided lower bound of Student's t for the mean over the scans of the difference of two Dice; scans
    that all three find empty are left out. -1, the least gain, for one scan, and where one scan is left,
    since one bounds nothing. None if several were given and all are left out.
    """
    ours, theirs = (
        Comparison.of(maps, reference, scan_index, classes).agreement(min_size)
        for maps in (candidate, parent)
    )
    seen = ~(np.isnan(ours) & np.isnan(theirs))
    if not seen.any() and len(seen) > 1:
        return None
    gains = (np.nan_to_num(ours, nan=1.0) - np.nan_to_num(theirs, nan=1.0))[seen]
    if len(gains) < 2:
        return -1.0
    error = gains.std(ddof=1) / np.sqrt(len(gains))
    return float(gains.mean() - special.stdtrit(len(gains) - 1, 0.95) * error)


def mean_fragments(maps: Maps, classes: int) -> float:
    """Connected pieces per slice and foreground class, over those that are there; 0 if none is."""
    pieces = pieces_of(maps, classes)
    return float(np.mean(pieces)) if pieces else 0.0


def pieces_of(maps: Maps, classes: int) -> list[int]:
    """How many connected pieces each foreground class has on each slice that it is on.

    Slice by slice, since slices of a volume may lie centimetres apart. Pixels that touch at a corner are one
    piece.
    """
    neighbours = np.ones((3,) * (maps.ndim - 1), dtype=np.int8)
    return [
        ndimage.label(own, neighbours)[1]
        for one in maps
        for index in range(1, classes)
        if (own := one == index).any()
    ]


def largest_plausible_share(before: float) -> float:
    """The share of a scan beyond which a mask is oversized, where the largest mask before has `before`.

    Twice as large, but where that is most of the image, half of what is left of it.
    """
    return max(min(2 * before, (1 + before) / 2), MIN_GROWTH)
