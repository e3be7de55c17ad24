"""Fit a lens to a hospital: as far as its scans are further away than hospitals naturally are.

For each kind of feature R is the squared shift of the hospital's cohort over what is natural between
hospitals (`Fingerprint.shifts`), and a = max(0, 1 - 1 / R) the share of it that is not natural; that much of
the shift is taken back. The curve of intensities moves from R = 4 on, two natural deviations: after blur or
noise a histogram is no monotone curve of the members', and nearer ones are mostly anatomy. Each step is
measured on what the steps before it leave.

The mean field tells inverted scans: organs and background have changed places in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np

from model_store.lens.features import Feature, Images, Kind, as_rows, correlation
from model_store.lens.fingerprint import KINDS, NONE, Fingerprint, Seen, Sums
from model_store.lens.lens import GAINS, Curve, Lens, rising

Step: TypeAlias = Literal["polarity", "field", "spectrum", "quantiles"]
STEPS: Final[tuple[Step, ...]] = ("polarity", "field", "spectrum", "quantiles")
# Images of a cohort with their patient, in the same order each time they are asked for.
Cohort: TypeAlias = Callable[[], Iterable[tuple[Hashable, Images]]]

# R from which on a step moves the scans.
_FROM: Mapping[Kind, float] = {"field": 1.0, "spectrum": 1.0, "quantiles": 4.0}
# How many times nearer the negative is, in quantiles and field together, where scans are inverted.
_NEGATIVE = 2.0
# The spectrum's gain is 1 at the mean of so many bands.
_LOWEST = 2
# A gain that is nearer to 1 than this share is none.
_DAMPS = 0.01
# The field says what is on the scans where every member is at least this much like the others.
LIKE = 0.5


@dataclass(frozen=True)
class Polarity:
    """How a cohort lies to the members, as it is and in negative.

    `correlation` is that of the mean fields; `nearer` how many times nearer the negative is: R of quantiles
    times R of field, over those of the negative.
    """

    correlation: float
    nearer: float

    @property
    def inverted(self) -> bool:
        """Whether the scans look inverted."""
        return self.correlation < 0 and self.nearer > _NEGATIVE

    @property
    def grid(self) -> float:
        """How strongly the mean field correlates with the members', either way: 0 to 1."""
        return abs(self.correlation)

    @property
    def sides(self) -> float:
        """How many times nearer the scans are than in negative, or the reverse."""
        return math.exp(abs(math.log(max(self.nearer, NONE))))


@dataclass(frozen=True)
class Fitted:
    """A lens, and what it was made by.

    Attributes:
        lens: its steps; without any, it changes nothing.
        before: R of each kind, of the scans as they are.
        shares: a of each step that was looked at, measured on what the steps before left.
        after: R of each kind, of the scans through the lens.
        polarity: None where it was not looked at.
        shows: whether the field says what is on the scans, since the members are alike in it.
        seen, through: the mean of each feature [C, E], of the scans as they are and through the lens.
    """

    lens: Lens
    before: Mapping[Kind, float]
    shares: Mapping[Kind, float]
    after: Mapping[Kind, float]
    polarity: Polarity | None
    shows: bool = True
    seen: Mapping[Kind, Feature] = field(default_factory=dict)
    through: Mapping[Kind, Feature] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """The shift through the lens over that of the scans as they are: geometric mean over the kinds."""
        logarithms = [
            math.log(max(self.after[kind], NONE) / max(self.before[kind], NONE)) for kind in self.before
        ]
        return math.exp(math.fsum(logarithms) / len(logarithms))

    @property
    def grid(self) -> float | None:
        """How strongly the mean field correlates with the members', 0 to 1; None where it says nothing."""
        return self.polarity.grid if self.polarity is not None and self.shows else None

    @property
    def sides(self) -> float | None:
        """How many times nearer the scans are than in negative, or the reverse; None as of `grid`."""
        return self.polarity.sides if self.polarity is not None and self.shows else None


def fit(
    cohort: Cohort, fingerprint: Fingerprint, steps: Collection[Step] = STEPS, *, full: bool = False
) -> Fitted | None:
    """Fit a lens of these steps to a cohort, in at most four passes over its images.

    With `full`, all of each shift is taken back. None where no image says anything. Raises ValueError for
    images of other channels than the fingerprint's.
    """
    seen = _seen(cohort, None)
    if not seen:
        return None
    if any(own.mean.shape != fingerprint.of_kind(kind).mean_CE.shape for kind, own in seen.items()):
        raise ValueError(
            f"expected images of {len(fingerprint.field.mean)} channels and {fingerprint.axes} axes, as the "
            "fingerprint's"
        )
    before = fingerprint.shifts(seen)
    lens = Lens(axes=fingerprint.axes, channels=len(seen["field"].mean))
    polarity = None
    if "polarity" in steps:
        polarity = polarity_of(seen, fingerprint)
        if polarity.inverted:
            lens = _with(lens, upright=as_rows(fingerprint.field.mean_CE))
    shares: dict[Kind, float] = {}
    moved: list[Step] = ["polarity"] if lens.negated else []
    for kind in KINDS:
        if kind not in steps:
            continue
        # What was seen before a step moved the scans is not what this one meets.
        own = _seen(cohort, lens, (kind,))[kind] if moved else seen[kind]
        share = 1.0 if full else _share(kind, own, fingerprint)
        step = _STEPS[kind](lens, own.mean, fingerprint.of_kind(kind).mean_CE, share) if share else lens
        shares[kind] = share if step is not lens else 0.0
        if step is not lens:
            lens = step
            moved.append(kind)
    through = _seen(cohort, lens) if moved else seen
    after = fingerprint.shifts(through)
    means = ({kind: own.mean for kind, own in each.items()} for each in (seen, through))
    return Fitted(lens, before, shares, after, polarity, fingerprint.likeness >= LIKE, *means)


def foreseen(seen: Mapping[Kind, Seen], fingerprint: Fingerprint) -> dict[Step, float]:
    """The steps that `fit` would take of a cohort of which only this is kept, each with its share a.

    Every step is measured on the scans as they are, or on their negative where they look inverted: what a
    step leaves to the next is not known.
    """
    found: dict[Step, float] = {}
    lens = Lens(axes=fingerprint.axes, channels=len(fingerprint.field.mean))
    if polarity_of(seen, fingerprint).inverted:
        found["polarity"], seen = 1.0, negative(seen)
    for kind, own in seen.items():
        share = _share(kind, own, fingerprint)
        if share and _STEPS[kind](lens, own.mean, fingerprint.of_kind(kind).mean_CE, share) is not lens:
            found[kind] = share
    return found


def _share(kind: Kind, seen: Seen, fingerprint: Fingerprint) -> float:
    """a: the share of the shift that is not natural."""
    return max(0.0, 1 - _FROM[kind] / max(fingerprint.of_kind(kind).shift(seen), NONE))


def polarity_of(seen: Mapping[Kind, Seen], fingerprint: Fingerprint) -> Polarity:
    """How a cohort lies to the members."""
    alike = correlation(seen["field"].mean, fingerprint.field.mean_CE)
    near, other = fingerprint.shifts(seen), fingerprint.shifts(negative(seen))
    ratio = near["quantiles"] * near["field"] / max(other["quantiles"] * other["field"], 1e-12)
    return Polarity(alike, ratio)


def negative(seen: Mapping[Kind, Seen]) -> dict[Kind, Seen]:
    """What is seen of the same images in negative."""
    turned: dict[Kind, Feature] = {
        "field": -seen["field"].mean,
        "spectrum": seen["spectrum"].mean,
        # `LEVELS` are as far from 0 as from 1.
        "quantiles": -seen["quantiles"].mean[:, ::-1],
    }
    return {kind: Seen(turned[kind], own.variance, own.patients) for kind, own in seen.items()}


def _seen(cohort: Cohort, lens: Lens | None, kinds: Sequence[Kind] = KINDS) -> dict[Kind, Seen]:
    sums = Sums(kinds)
    for patient, images in cohort():
        sums.add(patient, images if lens is None else lens.apply(images))
    return sums.seen()


def _with_field(lens: Lens, ours: Feature, theirs: Feature, share: float) -> Lens:
    return _with(lens, field=as_rows(share * (ours - theirs)))


def _with_spectrum(lens: Lens, ours: Feature, theirs: Feature, share: float) -> Lens:
    """Half of the logarithm of power, the mean over the channels, so that colours stay in place.

    A band is damped no more than those above it: noise is in the finest detail, and where scans have less of
    that than the members', nothing is damped.
    """
    gain = (share * (theirs - ours) / 2).mean(axis=0)
    gain = np.clip(gain - gain[:_LOWEST].mean(), *np.log(GAINS))
    gain = np.maximum.accumulate(gain[::-1])[::-1]
    if not gain.min() < -_DAMPS:
        return lens
    return _with(lens, spectrum=tuple(map(float, gain)))


def _with_curve(lens: Lens, ours: Feature, theirs: Feature, share: float) -> Lens:
    curves = []
    for own, other in zip(ours, theirs, strict=True):
        source = rising(own)
        target = (1 - share) * source + share * rising(other)
        curves.append(Curve(source=tuple(map(float, source)), target=tuple(map(float, target))))
    return _with(lens, curve=tuple(curves))


_STEPS: Mapping[Kind, Callable[[Lens, Feature, Feature, float], Lens]] = {
    "field": _with_field,
    "spectrum": _with_spectrum,
    "quantiles": _with_curve,
}


def _with(lens: Lens, **steps: object) -> Lens:
    return Lens.model_validate({**lens.model_dump(), **steps})
