"""Checks of masks beside some that the hospital drew: they must be plausible where none was drawn.

Whole scans are compared, on their own grid and as the service answers them: [H, W], or [I, J, K] plane by
plane along the last axis.

Legend: S scans.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from personalization.errors import LabelError
from personalization.gate.check import check
from personalization.gate.masks import (
    MIN_COMPONENT,
    Maps,
    checked_maps,
    largest_plausible_share,
    pieces_of,
)


class BesideDrawn:
    """A candidate's masks of a cohort beside the hospital's own of some scans."""

    def __init__(self, scans: Iterable[tuple[ArrayLike, ArrayLike | None]], classes: int) -> None:
        """Check the class maps and measure them, one scan after the other.

        Args:
            scans: the candidate's class map of each scan, and the hospital's where it drew one.
            classes: of the task, background included.

        Raises:
            LabelError: maps differ in shape or hold values that are no classes; no scan has a mask.
        """
        found_pieces: list[int] = []
        drawn_pieces: list[int] = []
        sizes: list[tuple[int, float, float, bool]] = []
        for found, drawn in scans:
            planes = _planes(checked_maps(found, "found", classes))
            drawn_size = 0.0
            if drawn is not None:
                truth = _planes(checked_maps(drawn, "drawn", classes))
                if truth.shape != planes.shape:
                    raise LabelError(f"drawn: expected the scan's {planes.shape}, found {truth.shape}")
                drawn_pieces += pieces_of(truth, classes)
                drawn_size = _size(truth)
            found_pieces += pieces_of(planes, classes)
            sizes.append((len(planes), _size(planes), drawn_size, drawn is not None))
        if not any(known for *_, known in sizes):
            raise LabelError("expected at least one scan with a mask, found none")
        planes_S, size_S, drawn_size_S, labelled_S = map(np.array, zip(*sizes, strict=True))
        self.planes_S: NDArray[np.int64] = planes_S
        # In planes' worth: a target counts the same in a thick stack of planes as in one plane.
        self.size_S: NDArray[np.float64] = size_S
        self.drawn_size_S: NDArray[np.float64] = drawn_size_S
        self.labelled_S: NDArray[np.bool_] = labelled_S
        self.pieces, self.drawn_pieces = (
            float(np.mean(pieces)) if pieces else 0.0 for pieces in (found_pieces, drawn_pieces)
        )


def _planes(maps: Maps) -> Maps:
    """The planes [n, H, W] of a map [H, W] or [I, J, K]."""
    return np.moveaxis(np.atleast_3d(maps), -1, 0)


def _size(planes: Maps) -> float:
    """The foreground, as a share of one plane."""
    return float(np.count_nonzero(planes) / planes[0].size)


@check(
    "giant",
    "at most",
    0.1,
    "share of the scans with a mask over twice the largest that was drawn",
    "Some of its masks are far larger than the largest that was drawn.",
)
def oversized_rate(observed: BesideDrawn) -> float:
    """One scan of ten may be unusual; more that are over twice the largest drawn mask are not plausible."""
    drawn_share = (observed.drawn_size_S / observed.planes_S)[observed.labelled_S]
    largest = largest_plausible_share(float(drawn_share.max()))
    return float(np.mean(observed.size_S / observed.planes_S > largest))


@check(
    "emptied",
    "at most",
    0.5,
    "share of the scans without a mask in which nothing is found, beyond that of empty ones among the others",
    "It finds nothing in too many of the scans without a mask.",
)
def lost_target_rate(observed: BesideDrawn) -> float | None:
    """Scans without a mask should be empty about as often as those with one. Which scans were drawn on may be
    no accident, so half of them may differ.
    """
    labelled = observed.labelled_S
    if labelled.all():
        return None
    found, drawn = observed.size_S[~labelled], observed.drawn_size_S[labelled]
    return float(np.mean(found < MIN_COMPONENT) - np.mean(drawn < MIN_COMPONENT))


@check(
    "fragments",
    "at most",
    2.0,
    "pieces per mask, plus one, over those of the drawn ones, plus one",
    "Its masks fall apart into more pieces than the drawn ones.",
)
def fragments(observed: BesideDrawn) -> float:
    """Up to twice as many pieces as were drawn, and one more."""
    return (observed.pieces + 1) / (observed.drawn_pieces + 1)
