"""Warn when a scan does not look like the scans that a network was trained on.

A site summarises each of its training scans in a few numbers and sends aggregates: counts, sums, products,
minima and maxima. The aggregates of sites merge by addition and are stored in the manifest. Before a scan is
segmented, its kind, size, spacing and tilt are compared with the ranges, and its appearance with the training
mean by the Mahalanobis distance (1936). A warning is text for people and changes no result. It is gross where
no training scan resembles the scan in kind: an image among volumes, another modality, a size or spacing far
outside training. Such a scan was most likely sent to the wrong model.

Less is known of a model that was made elsewhere: what its files say of the training scans. The same rules
compare a scan with that.

The guard does not know anatomy: an MR slice of another organ with a similar intensity distribution passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from model_store.appearance import DESCRIPTORS, describe, percentiles
from model_store.preprocessing import (
    Geometry,
    Prepared,
    PreparedVolume,
    VolumeGrid,
    geometry_of,
    grid_of,
)
from model_store.preprocessing.intensity import is_grey
from model_store.preprocessing.slices import thinned
from model_store.scans.types import Scan
from model_store.task import Normalisation, Task

# Squared distance per descriptor above which a scan counts as unlike training. Chosen on FLAIR slices of four
# institutions, each compared with the other three: at most a tenth of a new institution's slices exceed it,
# and nine tenths of ultrasound, retina and inverted images do.
_UNLIKE = 5.5
# Correlations are shrunk towards zero by a tenth, more with few scans. The standard deviation of a descriptor
# is at least `_LEAST_DEVIATION` (in standard deviations of a scan's intensities).
_SHRINKAGE = 0.1
_LEAST_DEVIATION = 0.05
# Standard deviation of a descriptor among scans of one kind, where no training scans are known.
_ALONE = 0.2

# Tolerance beyond the range seen in training: a factor for sizes and spacings, degrees for the tilt.
_FACTORS = {"rows": 1.5, "columns": 1.5, "slices": 3.0, "row_mm": 1.5, "column_mm": 1.5, "slice_mm": 2.0}
_TILT_MARGIN = 10.0
# Beyond this factor a size or spacing is gross. Twice the matrix or the resolution is common among scanners;
# numbers of slices vary with what was scanned.
_GROSS_FACTOR = 4.0
_GROSS_MEASURES = ("rows", "columns", "row_mm", "column_mm", "slice_mm")
_PHRASES = {
    "rows": "rows per slice",
    "columns": "columns per slice",
    "slices": "slices",
    "row_mm": "mm per row",
    "column_mm": "mm per column",
    "slice_mm": "mm between slices",
}
# Along the network's axes, which are all that the files of a model made elsewhere name.
_VOXELS = ("first_mm", "second_mm", "third_mm")
_LENGTHS = ("first_length", "second_length", "third_length")
# Factors beyond the range, as above: of voxels, of lengths, and of two lengths at once, which are gross.
_VOXEL_FACTOR, _LENGTH_FACTOR, _GROSS_LENGTHS = 2.0, 2.0, 3.0
# Beyond these factors a measure of an extent is unusual.
Extent: TypeAlias = Literal["spacing", "size"]
_EXTENTS: Mapping[Extent, Mapping[str, float]] = {
    "spacing": {
        **{name: _FACTORS[name] for name in ("row_mm", "column_mm", "slice_mm")},
        **dict.fromkeys(_VOXELS, _VOXEL_FACTOR),
    },
    "size": {
        **{name: _FACTORS[name] for name in ("rows", "columns", "slices")},
        **dict.fromkeys(_LENGTHS, _LENGTH_FACTOR),
    },
}
# The raw intensities of what the network looks for, or of its window.
FOREGROUND = "foreground"
_SAMPLES = 2**16
# A slice that is described has cells, and a border of a tenth of it.
_LEAST_SIDE = 16


@dataclass(frozen=True)
class GuardWarning:
    """One way in which a scan does not look like the training scans: a sentence, and whether it is gross."""

    text: str
    gross: bool = False


@dataclass(frozen=True)
class ScanSummary:
    """The guard's summary of one scan.

    `kind` is for example "grey volume", `modality` a DICOM header's, such as "CT". `measures` are sizes,
    spacings in mm, the tilt in degrees and raw intensities (1st, 50th and 99th percentile). `appearance` has
    one number per descriptor in `DESCRIPTORS`, none of a scan that is not prepared. `along` has the voxel and
    the length in mm along each axis of a network of volumes, without what is cropped.
    """

    kind: str
    measures: dict[str, float]
    appearance: tuple[float, ...]
    constant: bool
    modality: str | None = None
    along: dict[str, float] = field(default_factory=dict)


def along_axes(voxels: Sequence[float], lengths: Sequence[float]) -> dict[str, float]:
    """Name voxels and lengths in mm along the network's axes."""
    return dict(zip((*_VOXELS, *_LENGTHS), (*voxels, *lengths), strict=True))


def summarise(scan: Scan, prepared: Prepared | PreparedVolume) -> ScanSummary:
    """Summarise a scan and its prepared input."""
    slices = planes_of(prepared.volume) if isinstance(prepared, PreparedVolume) else prepared.slices
    appearance, constant = describe(slices)
    grid = prepared.grid if isinstance(prepared, PreparedVolume) else None
    outlined = _outlined(scan, prepared.geometry, grid)
    return replace(outlined, appearance=appearance, constant=constant)


def outline(scan: Scan, task: Task) -> ScanSummary:
    """Summarise a volume that is not prepared: all but what it looks like.

    Raises as `prepare_volume` does.
    """
    return _outlined(scan, geometry_of(scan, task), grid_of(scan, task))


def _outlined(scan: Scan, geometry: Geometry, grid: VolumeGrid | None) -> ScanSummary:
    count, rows, columns = geometry.slices
    measures = {"rows": float(rows), "columns": float(columns)}
    if geometry.spacing is not None:
        slice_mm, row_mm, column_mm = geometry.spacing
        measures |= {"slices": float(count), "slice_mm": slice_mm, "row_mm": row_mm, "column_mm": column_mm}
        measures["tilt"] = geometry.tilt_degrees
    low, middle, high = percentiles(thinned(scan.voxels, _SAMPLES), (1, 50, 99))
    measures |= {"raw_low": low, "raw_middle": middle, "raw_high": high}
    along: dict[str, float] = {}
    if grid is not None:
        axes = grid.axes
        along = along_axes([axis.spacing for axis in axes], [axis.count * axis.spacing for axis in axes])
    kind = f"{_colour(scan)} {'volume' if scan.is_volume and not scan.film else 'image'}"
    return ScanSummary(kind, measures, (), False, scan.modality, along)


def planes_of(volume_CXYZ: NDArray[np.float32]) -> NDArray[np.float32]:
    """View a network's volume as slices [S, C, H, W] along its last axis, for what describes slices."""
    sides = [max(0, _LEAST_SIDE - side) for side in volume_CXYZ.shape[1:3]]
    if any(sides):
        volume_CXYZ = np.pad(volume_CXYZ, ((0, 0), *((0, more) for more in sides), (0, 0)), mode="edge")
    return np.moveaxis(volume_CXYZ, -1, 0)


def _colour(scan: Scan) -> str:
    if scan.is_volume and (scan.channel_names or scan.channels not in (1, 3)):
        return f"{scan.channels}-channel"
    return "grey" if is_grey(scan.voxels) else "colour"


class Range(BaseModel):
    """Minimum and maximum over scans."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: FiniteFloat
    high: FiniteFloat


class ReferenceStatistics(BaseModel):
    """Aggregates over the training scans: counts, sums, minima and maxima.

    `sums` and `products` are over the scans' appearance vectors v: Σv and Σvvᵀ. Both are None of a model made
    elsewhere, of which only ranges are known; `count` is 0 where the number of its scans is not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(ge=0)
    kinds: dict[str, int]
    ranges: dict[str, Range]
    sums: tuple[FiniteFloat, ...] | None = Field(
        None, min_length=len(DESCRIPTORS), max_length=len(DESCRIPTORS)
    )
    products: tuple[tuple[FiniteFloat, ...], ...] | None = Field(
        None, min_length=len(DESCRIPTORS), max_length=len(DESCRIPTORS)
    )

    @model_validator(mode="after")
    def _appearance_whole(self) -> ReferenceStatistics:
        if (self.sums is None) != (self.products is None) or (self.sums is not None and not self.count):
            raise ValueError(
                f"expected sums and products of at least one scan, or neither, found count {self.count}"
            )
        return self

    @property
    def has_appearance(self) -> bool:
        """Whether it is known what the scans look like, beside their ranges."""
        return self.sums is not None

    @classmethod
    def of(cls, summary: ScanSummary, known: ReferenceStatistics | None = None) -> ReferenceStatistics:
        """Make the statistics of one scan, to be merged with `known`."""
        vector = np.array(summary.appearance)
        measures = summary.measures
        if known is not None and not known.has_appearance:
            measures = measures | summary.along
        return cls(
            count=1,
            kinds={summary.kind: 1},
            ranges={name: Range(low=value, high=value) for name, value in measures.items()},
            sums=summary.appearance,
            products=_rows(np.outer(vector, vector)),
        )

    def merge(self, other: ReferenceStatistics) -> ReferenceStatistics:
        """Combine the statistics of two sets of scans: where one has ranges alone, those that it has."""
        kinds = {
            kind: self.kinds.get(kind, 0) + other.kinds.get(kind, 0)
            for kind in sorted({*self.kinds, *other.kinds})
        }
        ranges = dict(self.ranges)
        for name, theirs in other.ranges.items():
            ours = ranges.get(name, theirs)
            ranges[name] = Range(low=min(ours.low, theirs.low), high=max(ours.high, theirs.high))
        for each in (self, other):
            if not each.has_appearance:
                ranges = {name: found for name, found in ranges.items() if name in each.ranges}
        whole = self.sums is not None and other.sums is not None
        return ReferenceStatistics(
            count=self.count + other.count,
            kinds=kinds,
            ranges=dict(sorted(ranges.items())),
            sums=tuple(a + b for a, b in zip(self.sums or (), other.sums or (), strict=True))
            if whole
            else None,
            products=_rows(np.array(self.products) + np.array(other.products)) if whole else None,
        )

    @property
    def mean(self) -> tuple[float, ...]:
        """The mean of each descriptor over the scans, where it is known what they look like."""
        assert self.sums is not None
        return tuple(value / self.count for value in self.sums)

    def mean_and_deviation(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Compute the mean and the standard deviation of each descriptor over the scans."""
        mean = np.array(self.mean)
        variance = np.diagonal(np.array(self.products)) / self.count - mean**2
        return mean, np.sqrt(np.maximum(variance, 0) + _LEAST_DEVIATION**2)

    def distance(self, appearance: tuple[float, ...]) -> float:
        """Compute the squared Mahalanobis distance per descriptor, about 1 for the training scans themselves.

        With n scans and d descriptors, correlations are shrunk by max(0.1, d / (n + d)). The distance is
        divided by 1 + d / n, because a mean and a covariance estimated from few scans overstate it.
        """
        mean, deviation, shrunk = self._frame
        size = len(DESCRIPTORS)
        z = (np.array(appearance) - mean) / deviation
        return float(z @ np.linalg.solve(shrunk, z)) / size / (1 + size / self.count)

    def whitened(self, appearances_ND: NDArray[np.float64]) -> NDArray[np.float64]:
        """Vectors [N, D] of which the differences have, as Euclidean length, the Mahalanobis distance."""
        mean, deviation, shrunk = self._frame
        z = (appearances_ND - mean) / deviation
        return np.asarray(np.linalg.solve(np.linalg.cholesky(shrunk), z.T).T)

    @cached_property
    def _frame(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Mean and deviation of each descriptor, and their shrunk correlation: the same for every scan."""
        size = len(DESCRIPTORS)
        mean, deviation = self.mean_and_deviation()
        covariance = np.array(self.products) / self.count - np.outer(mean, mean)
        correlation = covariance / np.outer(deviation, deviation)
        np.fill_diagonal(correlation, 1)
        weight = max(_SHRINKAGE, size / (self.count + size))
        return mean, deviation, (1 - weight) * correlation + weight * np.eye(size)


def distances(
    appearances: Sequence[tuple[float, ...]], reference: ReferenceStatistics | None
) -> NDArray[np.float64]:
    """Distances [N, N] of scans from each other; 1 is that of a scan from the training mean, from which on it
    looks unlike training.

    They are Mahalanobis distances, without a reference those of independent descriptors that vary as little
    as among scans of one kind.
    """
    vectors = np.array(appearances)
    whitened = vectors / _ALONE if reference is None else reference.whitened(vectors)
    between = np.sqrt(((whitened[:, None] - whitened[None]) ** 2).mean(axis=2))
    return np.asarray(between / np.sqrt(_UNLIKE))


def check(summary: ScanSummary, reference: ReferenceStatistics | None, task: Task) -> list[GuardWarning]:
    """Return one warning for each way in which the scan does not look like the training scans.

    Without a reference, only a constant scan and another modality than the task's are reported. The notes of
    a scan, on its container and header, are no warnings of the guard.
    """
    warnings = _another_modality(summary, task) + _without_foreground(summary, reference, task)
    if summary.constant:
        return [*warnings, GuardWarning("the scan has the same intensity everywhere; it shows nothing")]
    if reference is None:
        return warnings
    warnings += _another_kind(summary, reference, task)
    warnings += _beyond_ranges(summary, reference, task)
    warnings += [GuardWarning(text) for text in _raw_intensities(summary, reference, task)]
    if not reference.has_appearance:
        return warnings + _along(summary, reference)
    seen = _appearance(summary, reference) if summary.appearance else []
    return warnings + [GuardWarning(text) for text in seen]


@dataclass(frozen=True)
class Apart:
    """How a spacing or size lies to those of the training scans.

    `ratio` is that to the nearest of them, 1 within their range, and `factor` the one from which on the guard
    warns.
    """

    ratio: float
    factor: float

    @property
    def shift(self) -> float:
        """As R of the lens: 0 within the range, 1 half of the way to the factor by logarithm, 4 at it."""
        return (2 * math.log(self.ratio) / math.log(self.factor)) ** 2


def apart(summary: ScanSummary, reference: ReferenceStatistics | None) -> dict[Extent, Apart]:
    """How far the spacing and size of a scan are beyond those of training: of each, the measure that is
    farthest; without those that are not known of the scan or of training.
    """
    values = summary.measures | summary.along
    ranges = {} if reference is None else reference.ranges
    found: dict[Extent, Apart] = {}
    for extent, factors in _EXTENTS.items():
        known = [
            Apart(_ratio(values[name], ranges[name]), factor)
            for name, factor in factors.items()
            if name in values and name in ranges and min(values[name], ranges[name].low) > 0
        ]
        if known:
            found[extent] = max(known, key=lambda each: each.shift)
    return found


def _ratio(value: float, seen: Range) -> float:
    return value / seen.low if value < seen.low else max(value / seen.high, 1.0)


def is_mistaken(
    summary: ScanSummary, reference: ReferenceStatistics | None, warnings: Sequence[GuardWarning]
) -> bool:
    """Whether no training scan resembles this one in kind: a warning of `check` is gross, or colour differs.

    A grey scan among colour pictures is read all the same, since it may be one without colour filter. Where
    most scans of a hospital are such, nothing should be fitted to them.
    """
    colours = {kind.partition(" ")[0] for kind in reference.kinds} if reference is not None else set()
    return any(each.gross for each in warnings) or bool(
        colours and summary.kind.partition(" ")[0] not in colours
    )


def _another_modality(summary: ScanSummary, task: Task) -> list[GuardWarning]:
    if summary.modality is None or task.modality is None or summary.modality == task.modality:
        return []
    return [
        GuardWarning(
            f"the scan's modality is {summary.modality}; task '{task.name}' is for {task.modality}",
            gross=True,
        )
    ]


def _another_kind(summary: ScanSummary, reference: ReferenceStatistics, task: Task) -> list[GuardWarning]:
    if summary.kind in reference.kinds:
        return []
    seen = " or ".join(f"{kind}s" for kind in reference.kinds)
    # Colour may be an annotation on a grey picture; a volume of one slice is an image in a file for volumes.
    dimensions = {kind.rpartition(" ")[2] for kind in reference.kinds}
    slices = reference.ranges.get("slices")
    has_one_slice = summary.measures.get("slices") == 1 or (slices is not None and slices.low == 1)
    gross = summary.kind.rpartition(" ")[2] not in dimensions and not has_one_slice
    return [GuardWarning(f"the scan is a {summary.kind}; task '{task.name}' was trained on {seen}", gross)]


def _beyond_ranges(summary: ScanSummary, reference: ReferenceStatistics, task: Task) -> list[GuardWarning]:
    warnings = []
    for name, factor in _FACTORS.items():
        value, seen = summary.measures.get(name), reference.ranges.get(name)
        if value is None or seen is None or _within(value, seen, factor):
            continue
        # A classifier of small images is intended for full-size ones too, which are resized.
        judged = name in _GROSS_MEASURES and (task.kind == "segmentation" or name.endswith("_mm"))
        warnings.append(
            GuardWarning(
                f"the scan has {value:.4g} {_PHRASES[name]}; training had {_range(seen)}",
                gross=judged and not _within(value, seen, _GROSS_FACTOR),
            )
        )
    tilt, seen = summary.measures.get("tilt"), reference.ranges.get("tilt")
    if tilt is not None and seen is not None and tilt > seen.high + _TILT_MARGIN:
        warnings.append(
            GuardWarning(
                f"the scan is tilted by {tilt:.0f}° against the patient's axes; "
                f"training had at most {seen.high:.0f}°"
            )
        )
    return warnings


def _along(summary: ScanSummary, reference: ReferenceStatistics) -> list[GuardWarning]:
    """Compare voxels and lengths along the network's axes.

    One length far outside training says how much was scanned, two that another thing was.
    """
    if not summary.along:
        return []
    beyond = [
        name
        for name in _LENGTHS
        if (seen := reference.ranges.get(name)) and not _within(summary.along[name], seen, _GROSS_LENGTHS)
    ]
    warnings = []
    for name, value in summary.along.items():
        seen, is_length = reference.ranges.get(name), name in _LENGTHS
        if seen is None or _within(value, seen, _LENGTH_FACTOR if is_length else _VOXEL_FACTOR):
            continue
        axis = name.partition("_")[0]
        said = f"is {value:.4g} mm long" if is_length else f"has {value:.4g} mm per voxel"
        text = f"the scan {said} along the network's {axis} axis; training had {_range(seen)}"
        gross = len(beyond) > 1 and name in beyond if is_length else not _within(value, seen, _GROSS_FACTOR)
        warnings.append(GuardWarning(text, gross))
    return warnings


def _without_foreground(
    summary: ScanSummary, reference: ReferenceStatistics | None, task: Task
) -> list[GuardWarning]:
    """Warn of a scan without any intensity of what the network looks for, where it sees the scanner's "
    "units."""
    seen = None if reference is None else reference.ranges.get(FOREGROUND)
    if seen is None or task.channel_count > 1 or not _in_units(task.channel_list[0].normalisation):
        return []
    low, high = summary.measures["raw_low"], summary.measures["raw_high"]
    if low <= seen.high and high >= seen.low:
        return []
    text = (
        f"the raw intensities run from {low:.4g} to {high:.4g} (1st to 99th percentile), and none of what "
        f"the network looks for, {_range(seen)}, is among them: are they in the same units?"
    )
    return [GuardWarning(text, gross=True)]


def _within(value: float, seen: Range, factor: float) -> bool:
    return seen.low / factor <= value <= seen.high * factor


def _raw_intensities(summary: ScanSummary, reference: ReferenceStatistics, task: Task) -> list[str]:
    """Compare raw intensities, only if the network depends on the scanner's units (window, or no scaling)."""
    # With several channels, the raw intensities are those of all together.
    if not any(_in_units(each.normalisation) for each in task.channel_list):
        return []
    low, high = reference.ranges.get("raw_low"), reference.ranges.get("raw_high")
    if low is None or high is None:
        return []
    margin = 0.5 * max(high.high - low.low, 1e-6)
    found_low, found_high = summary.measures["raw_low"], summary.measures["raw_high"]
    if low.low - margin <= found_low <= found_high <= high.high + margin and found_high >= high.low - margin:
        return []
    return [
        f"the raw intensities run from {found_low:.4g} to {found_high:.4g} (1st to 99th percentile); "
        f"training had {low.low:.4g} to {high.high:.4g}: are they in the same units?"
    ]


def _in_units(normalisation: Normalisation) -> bool:
    fixed = any(step.step != "zscore" and step.window is not None for step in normalisation.ordered_steps)
    return fixed or normalisation.method in ("none", "fixed")


def _appearance(summary: ScanSummary, reference: ReferenceStatistics) -> list[str]:
    distance = reference.distance(summary.appearance)
    if distance <= _UNLIKE:
        return []
    mean, deviation = reference.mean_and_deviation()
    z = np.abs(np.array(summary.appearance) - mean) / deviation
    phrases = list(dict.fromkeys(list(DESCRIPTORS.values())[index] for index in np.argsort(-z)))[:2]
    return [
        f"the scan does not look like the {reference.count} training scans: it differs most by "
        f"{' and '.join(phrases)} (distance {distance:.1f}, expected up to {_UNLIKE})"
    ]


def _range(seen: Range) -> str:
    return f"{seen.low:.4g}" if seen.low == seen.high else f"{seen.low:.4g} to {seen.high:.4g}"


def _rows(matrix: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in matrix)
