"""The gate of a lens, which sees no weight: what it leaves of the shift, and what the network makes of it.

A candidate is the network as it answers scans through the lens, with or without a dose; its parent is the
global model, which sees the scans as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from numpy.typing import ArrayLike

from personalization.gate.check import Check, check
from personalization.gate.parent import (
    EPS,
    BesideParent,
    Targets,
    fragments,
    lost_target_rate,
    oversized_rate,
    size_factor,
)
from personalization.gate.shift import (
    ObservedClasses,
    Shifted,
    class_lost,
    mistaken,
    practice_lost,
    practised,
    shift_beyond_practice,
)

# A parent that finds less than this share of what the members' targets are, or of all pixels where these are
# not known, finds next to nothing.
_BLIND, _NOTHING = 0.1, 1e-3


@dataclass(frozen=True)
class ThroughLens:
    """What is known of a lens before a mask is looked at.

    Attributes:
        left: the shift of the scans through the lens over that of the scans as they are: the geometric mean
            over the kinds of features.
        licence: the same of the network's own shift, at its batch norms; None: it has none.
        grid: how strongly the mean of the scans correlates with that of the members', 0 to 1; None where the
            members' own differ too much to say.
        sides: how many times nearer to the members the scans are than in negative, or the reverse, at least
            1; None as of `grid`.
        negated: whether the lens negates the scans.
        zoom: how many times larger the network sees the scans, since their structures are smaller.
    """

    left: float
    licence: float | None = None
    grid: float | None = None
    sides: float | None = None
    negated: bool = False
    zoom: float = 1.0


class OfLens(Protocol):
    """What all gates of a lens have."""

    @property
    def lens(self) -> ThroughLens:
        """The lens."""


@dataclass(frozen=True)
class ObservedScans:
    """What a lens says of the scans, whatever the network."""

    lens: ThroughLens


class ObservedLens(BesideParent):
    """A segmentation through a lens."""

    def __init__(
        self,
        candidate: ArrayLike,
        parent: ArrayLike,
        scan_index: ArrayLike,
        classes: int,
        targets: Targets,
        natural: float,
        lens: ThroughLens,
        shifted: Shifted,
    ) -> None:
        """Compare the masks as `BesideParent`, which raises LabelError.

        `natural` is the standard deviation over the members of the logarithm of their targets' size, 0 where
        it is not known; `shifted` is of the scans through the lens.
        """
        super().__init__(candidate, parent, scan_index, classes, targets)
        self.natural, self.lens, self.shifted = natural, lens, shifted
        if lens.zoom != 1:
            # A target is so much less of images that are so many times wider.
            share, largest = (each / lens.zoom**2 for each in (targets.share, targets.largest))
            self.targets = replace(targets, share=share, largest=largest)

    @property
    def found(self) -> tuple[float, float]:
        """Share of all pixels that are foreground: the candidate's and the parent's."""
        counts = self.comparison.counts.sum(axis=0)
        return float(counts[1:].sum() / counts.sum()), float(counts[:, 1:].sum() / counts.sum())

    @property
    def parent_is_blind(self) -> bool:
        """Whether the parent finds next to nothing, so that it is no measure of a mask."""
        return self.found[1] < (_BLIND * self.targets.share or _NOTHING)

    @property
    def parent_measures(self) -> bool:
        """Whether the parent is a measure of a mask: it finds something, in scans that are not inverted, and
        of the members' scale.
        """
        return not (self.parent_is_blind or self.lens.negated or self.lens.zoom != 1)


class ObservedClassesThroughLens(ObservedClasses):
    """A classification through a lens."""

    def __init__(
        self,
        candidate: ArrayLike,
        parent: ArrayLike,
        classes: int,
        lens: ThroughLens,
        shifted: Shifted,
        *,
        licensed: bool,
    ) -> None:
        """Count the classes as `ObservedClasses`, which raises LabelError."""
        super().__init__(candidate, parent, classes, shifted, licensed=licensed)
        self.lens = lens


@check(
    "lens_left",
    "at most",
    1.0,
    "the shift that is left of these scans through the lens, over that of the scans as they are",
    "Through the lens the scans are not nearer to the members'.",
)
def lens_left(observed: OfLens) -> float:
    """A lens takes back what is not natural of the shift, so less of it is left."""
    return observed.lens.left


@check(
    "lens_licence",
    "at most",
    2 / 3,
    "the shift that the network itself sees through the lens, over that of the scans as they are",
    "The network does not see through the lens what it expects: what is different is not the scanner.",
)
def lens_licence(observed: OfLens) -> float | None:
    """Scale and anatomy shift the features as a scanner does, and no lens cures them. In nine conditions of a
    wide-field camera the network's own shift fell to a half or less where the lens helped, and rose or stayed
    where it harmed.
    """
    return observed.lens.licence


@check(
    "lens_grid",
    "at least",
    0.25,
    "how strongly the mean of these scans correlates with that of the members' scans",
    "These scans do not show what the members' scans show.",
)
def lens_grid(observed: OfLens) -> float | None:
    """Nine cohorts of smooth noise were within -0.10 and 0.24, and hospitals, as they are, behind scanners or
    inverted, beyond 0.26.
    """
    return observed.lens.grid


@check(
    "lens_sides",
    "at least",
    1.25,
    "how many times nearer to the members' these scans are than in negative, or the reverse",
    "These scans are as near to the members' in negative: they do not show what the members' scans show.",
)
def lens_sides(observed: OfLens) -> float | None:
    """Of noise both are equally near: within 1.18 in the cohorts of noise that were tried, rough and smooth.
    The hospitals of the trial were beyond 1.28.
    """
    return observed.lens.sides


@check(
    "lens_size",
    "at most",
    2.0,
    "by how much the structures grew or shrank over all scans, against the parent or the members",
    "A structure became far larger or smaller over all scans.",
)
def lens_size(observed: ObservedLens) -> float | None:
    """As `size_factor`. A parent that finds next to nothing, or that sees inverted scans, is no measure; the
    members' size is, give or take a standard deviation over them. Where that is unknown there is none.
    """
    share, now = observed.targets.share, observed.found[0]
    if observed.parent_measures:
        return size_factor.measure(observed)
    if not share:
        return None
    away = abs(math.log((now + EPS) / (share + EPS)))
    return math.exp(max(away - observed.natural, 0.0))


@check(
    "lens_giant",
    "at most",
    0.1,
    "share of the scans with a mask far beyond the largest of the parent and of the members' targets",
    "Some of its masks are far beyond the largest of before.",
)
def lens_giant(observed: ObservedLens) -> float | None:
    """As `giant`, where there is a measure."""
    if not (observed.targets.largest or observed.parent_measures):
        return None
    return oversized_rate.measure(observed)


@check(
    "lens_pieces",
    "at most",
    2.0,
    "pieces per mask, plus one, over those of the parent or of the members' targets, plus one",
    "Its masks fall apart into more pieces.",
)
def lens_pieces(observed: ObservedLens) -> float | None:
    """As `fragments`. Beside a parent that finds next to nothing twice as many are allowed: a structure in
    pieces is more than none.
    """
    if not (observed.targets.pieces or observed.parent_measures):
        return None
    value = fragments.measure(observed)
    return value / 2 if value is not None and observed.parent_is_blind else value


# For a dose of the scans as they are, where a lens was looked at.
SHOWS: tuple[Check[OfLens], ...] = (lens_grid, lens_sides)

BY_LENS: tuple[Check[ObservedLens], ...] = (
    lens_left,
    lens_licence,
    lens_grid,
    lens_sides,
    shift_beyond_practice,
    mistaken,
    practice_lost,
    lens_size,
    lost_target_rate,
    lens_giant,
    lens_pieces,
)

BY_LENS_WITHOUT_MASKS: tuple[Check[ObservedClassesThroughLens], ...] = (
    lens_left,
    lens_licence,
    lens_grid,
    lens_sides,
    shift_beyond_practice,
    mistaken,
    practised,
    practice_lost,
    class_lost,
)
