"""The fingerprint of a federation: what its members' scans look like, and how far members are apart.

Every member k measures each feature of its training images and sends two things per kind: the mean over its
patients mu_k, and the variance between patients v_k, of n_k patients. With mu the mean over the K members,
D_k the mean square of mu_k - mu over the entries and s_k = v_k / n_k, the natural squared shift of a hospital
from outside is

    tau = (K + 1) / (K - 1) . geometric mean over k of max(D_k - s_k, 0.2 D_k)

as of the networks' own statistics (`personalization.iop_fl.spread`, which says why).

One group of n patients does not say how far hospitals are apart. It is taken for

    tau = 5 (n + 1) / (n - 1) . v

with v the variance between its patients (`ONE_GROUP`): hospitals of five sets lay 0.1 to 4.7 v from one
another, by set and kind in the geometric mean. Too large a tau leaves scans as they are.

Shape suffixes: C channels, E entries, K members.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from model_store.lens.features import (
    CELLS,
    FEATURES,
    Feature,
    Images,
    Kind,
    as_rows,
    correlation,
    entries_of,
    standardised,
)

FILE: Final = "fingerprint.json"
KINDS: tuple[Kind, ...] = ("field", "spectrum", "quantiles")
# A shift that is as good as none.
NONE: Final = 1e-12
# Squared shift between hospitals over the variance between the patients of one, where it is not known: above
# the largest that was measured (docs/explanation/lens.md has the table).
ONE_GROUP: Final = 5.0
# Share of a member's shift that counts as natural at least: its patients may explain all of it by chance.
_LEAST_NATURAL = 0.2
# Members that are equal to the digit have no logarithm.
_LEAST = 1e-8
_MOST_MEMBERS = 4096
# No mean of a cell and no quantile of a standardised image is near it, nor the logarithm of a power.
_MOST_ENTRY = 1e3


@dataclass(frozen=True)
class Seen:
    """One feature of a group of patients: the mean over them [C, E], the variance between them, their number.

    `variance` is the mean over the entries; of one patient it is unknown, and 0.
    """

    mean: Feature
    variance: float
    patients: int

    @property
    def sampling(self) -> float:
        """The variance that the choice of these patients brings to the mean."""
        return self.variance / self.patients


class Sums:
    """Sums over images, patient by patient, of which `Seen` is made."""

    def __init__(self, kinds: Sequence[Kind] = KINDS) -> None:
        self._kinds = kinds
        self._sums: dict[Hashable, dict[Kind, Feature]] = {}
        self._counts: dict[Hashable, int] = {}

    def add(self, patient: Hashable, images_NC: Images) -> None:
        """Add some images of a patient; constant ones say nothing and are left out."""
        images, _, deviation = standardised(images_NC)
        images = images[(deviation > 0).reshape(len(images), -1).all(axis=1)]
        if not len(images):
            return
        own = self._sums.setdefault(patient, {})
        self._counts[patient] = self._counts.get(patient, 0) + len(images)
        for kind in self._kinds:
            own[kind] = own.get(kind, 0.0) + FEATURES[kind](images).sum(axis=0)

    def include(self, other: Sums) -> None:
        """Add what another has summed of the same kinds."""
        for patient, sums in other._sums.items():
            own = self._sums.setdefault(patient, {})
            self._counts[patient] = self._counts.get(patient, 0) + other._counts[patient]
            for kind, each in sums.items():
                own[kind] = own.get(kind, 0.0) + each

    def seen(self) -> dict[Kind, Seen]:
        """Every feature; empty where there was no image that says anything."""
        if not self._sums:
            return {}
        found = {}
        for kind in self._kinds:
            means = np.stack([sums[kind] / self._counts[name] for name, sums in self._sums.items()])
            variance = float(means.var(axis=0, ddof=1).mean()) if len(means) > 1 else 0.0
            found[kind] = Seen(means.mean(axis=0), variance, len(means))
        return found


def seen_of(images: Iterable[tuple[Hashable, Images]]) -> dict[Kind, Seen]:
    """Every feature of some images, each with its patient."""
    sums = Sums()
    for patient, each in images:
        sums.add(patient, each)
    return sums.seen()


class KindPrint(BaseModel):
    """One feature over the members: the mean of their means [C][E], tau, and the variance of one patient.

    `tau` is the natural squared shift of a hospital from outside, a mean over the entries.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: tuple[tuple[FiniteFloat, ...], ...] = Field(min_length=1)
    tau: FiniteFloat = Field(gt=0)
    patient: FiniteFloat = Field(ge=0)

    @classmethod
    def of(cls, members: Sequence[Seen]) -> KindPrint:
        """Make it of two members or more."""
        count = len(members)
        mean = np.mean([each.mean for each in members], axis=0)
        logarithms = []
        for each in members:
            away = float(np.square(each.mean - mean).mean())
            logarithms.append(math.log(max(away - each.sampling, _LEAST_NATURAL * away, _LEAST)))
        tau = (count + 1) / (count - 1) * math.exp(math.fsum(logarithms) / count)
        patient = math.fsum(each.variance for each in members) / count
        return cls(mean=as_rows(mean), tau=tau, patient=patient)

    @classmethod
    def of_one(cls, group: Seen, factor: float) -> KindPrint:
        """Make it of one group, of which the patients differ; tau is this factor of their variance."""
        return cls(mean=as_rows(group.mean), tau=factor * group.variance, patient=group.variance)

    @property
    def mean_CE(self) -> Feature:
        """The mean as an array."""
        return np.array(self.mean)

    def shift(self, seen: Seen) -> float:
        """R: the squared shift of a hospital over what is natural; 1 is as usual."""
        sampling = seen.sampling if seen.patients > 1 else self.patient
        return float(np.square(seen.mean - self.mean_CE).mean()) / (self.tau + sampling)


class Fingerprint(BaseModel):
    """What a federation's scans look like to the lens, by kind.

    `axes` is 2 of slices and 3 of volumes. `likeness` is the least correlation of a member's mean field with
    that of the other members: how much the grid says of what is on the scans. `factor` is tau over the
    variance of one patient where that is all that is known of it, of one group; else None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["locum-fingerprint/1"] = "locum-fingerprint/1"
    members: int = Field(ge=1, le=_MOST_MEMBERS)
    axes: Literal[2, 3]
    likeness: FiniteFloat = Field(ge=-1, le=1)
    factor: FiniteFloat | None = Field(default=None, gt=0)
    field: KindPrint
    spectrum: KindPrint
    quantiles: KindPrint

    @model_validator(mode="after")
    def _of_its_shapes(self) -> Fingerprint:
        channels = len(self.field.mean)
        for kind in KINDS:
            expected = (channels, entries_of(kind, self.axes))
            rows = self.of_kind(kind).mean
            if len(rows) != channels or any(len(row) != expected[1] for row in rows):
                raise ValueError(
                    f"{kind}: expected means of {expected[0]} channels and {expected[1]} entries, found "
                    f"{[len(row) for row in rows]}"
                )
        if (self.members == 1) != (self.factor is not None):
            raise ValueError(
                f"expected a factor of one group and of no more, found {self.factor} of {self.members}"
            )
        return self

    @classmethod
    def of(cls, members: Sequence[Mapping[Kind, Seen]]) -> Fingerprint:
        """Make it of two members or more. Raises ValueError for images of different shapes."""
        found = {kind: KindPrint.of([member[kind] for member in members]) for kind in KINDS}
        fields = np.stack([member["field"].mean for member in members])
        others = (fields.sum(axis=0) - fields) / (len(fields) - 1)
        likeness = min(correlation(own, other) for own, other in zip(fields, others, strict=True))
        return cls(members=len(members), axes=_axes_of(members[0]), likeness=likeness, **found)

    @classmethod
    def of_one(cls, group: Mapping[Kind, Seen]) -> Fingerprint:
        """Make it of one group of two patients or more. Raises ValueError for patients who are all alike.

        Its likeness is the correlation that one patient's mean field is expected to have with the group's.
        """
        field = group["field"]
        if any(seen.variance < _LEAST for seen in group.values()):
            raise ValueError(
                "expected scans that differ between patients, found the same of each: is one scan there "
                "several times?"
            )
        factor = ONE_GROUP * (field.patients + 1) / (field.patients - 1)
        shown = float(field.mean.var())
        return cls(
            members=1,
            axes=_axes_of(group),
            likeness=math.sqrt(shown / (shown + field.variance)),
            factor=factor,
            **{kind: KindPrint.of_one(group[kind], factor) for kind in KINDS},
        )

    def of_kind(self, kind: Kind) -> KindPrint:
        """What is known of one feature."""
        found: KindPrint = getattr(self, kind)
        return found

    def shifts(self, seen: Mapping[Kind, Seen]) -> dict[Kind, float]:
        """R of every kind that was seen."""
        return {kind: self.of_kind(kind).shift(own) for kind, own in seen.items()}

    def to_bytes(self) -> bytes:
        """As JSON; equal fingerprints give equal bytes."""
        return (self.model_dump_json(indent=1, exclude_none=True) + "\n").encode()


def mean_shift(shifts: Mapping[Kind, float]) -> float:
    """The geometric mean of R over the kinds; infinite without any, where no image says anything."""
    if not shifts:
        return math.inf
    return math.exp(math.fsum(math.log(max(shift, NONE)) for shift in shifts.values()) / len(shifts))


def _axes_of(member: Mapping[Kind, Seen]) -> Literal[2, 3]:
    return 2 if member["field"].mean.shape[1] == CELLS**2 else 3


def check_seen(kind: Kind, mean: NDArray[np.float64], variance: float) -> None:
    """Raise ValueError for what no member can have seen."""
    if mean.ndim != 2 or mean.shape[1] not in {entries_of(kind, axes) for axes in (2, 3)}:
        raise ValueError(f"{kind}: expected means [channels, entries], found {list(mean.shape)}")
    if not (np.isfinite(mean).all() and np.abs(mean).max() <= _MOST_ENTRY):
        raise ValueError(f"{kind}: expected means of {_MOST_ENTRY:g} at most")
    if not 0 <= variance <= _MOST_ENTRY**2:
        raise ValueError(f"{kind}: expected a variance of at least 0, found {variance:g}")
