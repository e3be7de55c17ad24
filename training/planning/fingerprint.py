"""What a site says of its volumes for a plan: counts that add up over sites, and nothing of a single patient.

    spacing, shape, extent   by axis: cases by mm per voxel, by voxels, and by mm, in bins of 1 %
    kept                     cases by the share of voxels that cropping to non-zero leaves
    ct                       cases that look like computed tomography
    intensity, moments       of sites with CT, by channel: the foreground's intensities in bins of 4 HU, each
                             case with mass 1; the mass, and its sum and sum of squares

Sums over sites are the fingerprint of their pooled cases. There is no list of cases, and no least or largest
value. A bin that fewer than `LEAST_PATIENTS` patients are in, or fewer than the site's own minimum, is merged
with its neighbours, at the ends of a histogram and inside: an implant of one patient has no bin of its own.
A site with fewer patients than that sends nothing.

Axes are the patient's, R, A, S, whatever the order in the file. Shape and extent are after cropping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np
import torch
from numpy.typing import NDArray

from model_store.errors import ScanMismatch
from model_store.scans.types import Scan
from model_store.task import Task
from training.algorithm import SiteSize, State
from training.planning.planner import Intensities, Summary

LEAST_PATIENTS = 3

# Bins of lengths: 1 % each, from 0.05 (mm or voxels) to 5000, open at both ends.
_FIRST, _STEP = 0.05, math.log(1.01)
LENGTHS = math.ceil(math.log(5000 / _FIRST) / _STEP)
SHARES = 20
# Bins of intensities: Hounsfield units, open at both ends.
_AIR, _WIDTH = -1024.0, 4.0
INTENSITIES = 1024
# Air around or in the body is near -1000; no other modality has such values.
_LIKE_AIR = -500.0
# What a scanner has: mm per voxel, voxels along an axis. Bins have an open end.
_MOST_SPACING, _MOST_VOXELS = 50.0, 4096.0
# The geometric mean of the extents over that of voxels times mm per voxel: groups of a few cases that are
# very unlike move both.
_MOST_FACTOR = 32.0
# Of mean and deviation of a site's intensities, in Hounsfield units: dense bone and metal are below it.
_MOST_INTENSITY = 4096.0
# No hospital has more; sums of counts stay whole.
MOST_CASES = 10**7

_orientations: Any = nib.orientations  # nibabel has no type annotations


@dataclass(frozen=True)
class Measured:
    """One case. It stays at the site. `histograms` and `moments` (mean, mean square) are by channel.

    `kept` is the share of voxels after cropping. A case without foreground has no intensities.
    """

    patient: str
    spacing: tuple[float, float, float]
    shape: tuple[int, int, int]
    kept: float
    looks_like_ct: bool
    histograms: NDArray[np.float64] | None
    moments: NDArray[np.float64] | None


def measure(patient: str, scan: Scan, mask: Scan, task: Task) -> Measured:
    """Measure one case: a volume with its channels, and its mask on the same grid.

    Raises ScanMismatch for a picture, which has no millimetres.
    """
    if scan.affine is None:
        raise ScanMismatch(
            "a plan needs volumes with a position in millimetres, found a picture; train without a plan"
        )
    channels = scan.voxels
    cropped = channels[_box_of_nonzero(channels)]
    stored = _orientations.io_orientation(scan.affine)[:, 0].astype(int)
    mm = np.linalg.norm(scan.affine[:3, :3], axis=0) * scan.mm_per_unit
    spacing, shape = np.empty(3), np.empty(3, int)
    spacing[stored], shape[stored] = mm, cropped.shape[:3]
    modality = task.modality or scan.modality
    foreground = np.empty((0, scan.channels))
    # The mask of another grid, such as a segment of a part of the planes, belongs to other voxels.
    if mask.voxels.shape[:3] == channels.shape[:3]:
        foreground = channels[_foreground(mask, task)].astype(np.float64)
    histograms = moments = None
    if len(foreground):
        bins = np.clip(np.floor((foreground - _AIR) / _WIDTH), 0, INTENSITIES - 1).astype(int)
        counts = [np.bincount(channel, minlength=INTENSITIES) for channel in bins.T]
        histograms = np.stack(counts) / len(foreground)
        moments = np.stack([foreground.mean(axis=0), np.square(foreground).mean(axis=0)], axis=1)
    return Measured(
        patient,
        (float(spacing[0]), float(spacing[1]), float(spacing[2])),
        (int(shape[0]), int(shape[1]), int(shape[2])),
        cropped.size / channels.size,
        (modality == "CT" if modality else float(channels.min()) <= _LIKE_AIR),
        histograms,
        moments,
    )


def _box_of_nonzero(channels: NDArray[Any]) -> tuple[slice, ...]:
    """The smallest box with every voxel that is not zero in all channels; the whole of an empty scan."""
    nonzero = (channels != 0).any(axis=-1)
    box = []
    for axis in range(3):
        inside = np.flatnonzero(nonzero.any(axis=tuple(other for other in range(3) if other != axis)))
        box.append(slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(None))
    return tuple(box)


def _foreground(mask: Scan, task: Task) -> NDArray[np.bool_]:
    values = [value for each in task.classes[1:] for value in each.values]
    found: NDArray[np.bool_] = np.isin(mask.voxels[..., 0], values)
    return found


def fingerprint(cases: Sequence[Measured], channels: int, least: int = LEAST_PATIENTS) -> State:
    """Aggregate a site's training cases. Empty, if there are fewer than `least` patients."""
    if len({case.patient for case in cases}) < least:
        return {}
    patients = [case.patient for case in cases]
    spacing = np.array([case.spacing for case in cases])
    shape = np.array([case.shape for case in cases], dtype=float)
    ct = sum(case.looks_like_ct for case in cases)
    intensity, moments = np.zeros((channels, INTENSITIES)), np.zeros((channels, 3))
    with_foreground = [case for case in cases if case.histograms is not None]
    enough = len({case.patient for case in with_foreground}) >= least
    # A site without CT has no use for them: its images are normalised one by one.
    if 2 * ct > len(cases) and enough:
        intensity, moments = _intensities(with_foreground, least)
    content = {
        "cases": np.array([len(cases)]),
        "spacing": np.stack([_lengths(axis, patients, least) for axis in spacing.T]),
        "shape": np.stack([_lengths(axis, patients, least) for axis in shape.T]),
        "extent": np.stack([_lengths(axis, patients, least) for axis in (shape * spacing).T]),
        "kept": _grouped(_share_bins([case.kept for case in cases]), patients, least, SHARES),
        "ct": np.array([ct if least <= ct <= len(cases) - least else len(cases) * (2 * ct > len(cases))]),
        "intensity": intensity,
        "moments": moments,
    }
    return {name: torch.from_numpy(values.astype(np.float64)) for name, values in content.items()}


def _intensities(cases: Sequence[Measured], least: int) -> tuple[NDArray[Any], NDArray[Any]]:
    histograms = np.stack([case.histograms for case in cases if case.histograms is not None])
    means = np.stack([case.moments for case in cases if case.moments is not None])
    summed = histograms.sum(axis=0)
    of_patient: dict[str, NDArray[np.bool_]] = {}
    for case, found in zip(cases, histograms > 0, strict=True):
        of_patient[case.patient] = of_patient.get(case.patient, np.zeros_like(found)) | found
    of_each = np.stack([*of_patient.values()])
    summed = np.stack([_shared(channel, of_each[:, i], least) for i, channel in enumerate(summed)])
    mass = np.full((summed.shape[0], 1), len(cases), dtype=float)
    return summed, np.concatenate([mass, means.sum(axis=0)], axis=1)


def _shared(summed: NDArray[np.float64], of_patient: NDArray[np.bool_], least: int) -> NDArray[np.float64]:
    """Merge neighbouring bins of a histogram until `least` patients are in each group.

    `of_patient` [patients, bins] says which bins a patient is in. A group's mass goes to the bin that most of
    its patients are in; where no bin has enough of them, to the middle of the group, which is no patient's.
    """
    groups: list[list[int]] = [[]]
    for each in np.flatnonzero(of_patient.any(axis=0)):
        if of_patient[:, groups[-1]].any(axis=1).sum() >= least:
            groups.append([])
        groups[-1].append(int(each))
    if len(groups) > 1 and of_patient[:, groups[-1]].any(axis=1).sum() < least:
        groups[-2:] = [groups[-2] + groups[-1]]
    merged = np.zeros_like(summed)
    patients = of_patient.sum(axis=0)
    for group in groups:
        fullest = max(group, key=lambda each: patients[each])
        place = fullest if patients[fullest] >= least else (group[0] + group[-1]) // 2
        merged[place] += summed[group].sum()
    return merged


def _lengths(values: NDArray[np.float64], patients: Sequence[str], least: int) -> NDArray[np.float64]:
    bins = np.floor(np.log(values / _FIRST) / _STEP + 1e-9)
    return _grouped(np.clip(bins, 0, LENGTHS - 1).astype(int), patients, least, LENGTHS)


def _share_bins(shares: Sequence[float]) -> NDArray[np.int_]:
    bins: NDArray[np.int_] = np.clip(np.floor(np.array(shares) * SHARES), 0, SHARES - 1).astype(int)
    return bins


def _grouped(bins: NDArray[np.int_], patients: Sequence[str], least: int, count: int) -> NDArray[np.float64]:
    """Count cases by bin, in groups of neighbouring bins with `least` patients each, at their median bin."""
    counts = np.zeros(count)
    order = np.argsort(bins, kind="stable")
    groups: list[list[int]] = [[]]
    for place, case in enumerate(order):
        whole = place > 0 and bins[case] != bins[order[place - 1]]
        if whole and len({patients[i] for i in groups[-1]}) >= least:
            groups.append([])
        groups[-1].append(int(case))
    if len(groups) > 1 and len({patients[i] for i in groups[-1]}) < least:
        groups[-2:] = [groups[-2] + groups[-1]]
    for group in groups:
        counts[sorted(bins[group])[(len(group) - 1) // 2]] += len(group)
    return counts


def check(state: State, size: SiteSize, channels: int) -> None:
    """Raise ValueError for a fingerprint that no site of this size can have."""
    if not state:
        return
    shapes = {
        "cases": (1,),
        "spacing": (3, LENGTHS),
        "shape": (3, LENGTHS),
        "extent": (3, LENGTHS),
        "kept": (SHARES,),
        "ct": (1,),
        "intensity": (channels, INTENSITIES),
        "moments": (channels, 3),
    }
    if {name: tuple(tensor.shape) for name, tensor in state.items()} != shapes:
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        raise ValueError(f"expected the tensors {shapes}, found {found}")
    values = {name: tensor.double().numpy() for name, tensor in state.items()}
    if not all(np.isfinite(each).all() for each in values.values()):
        raise ValueError("expected finite values")
    cases = float(values["cases"][0])
    most = MOST_CASES if size.cases is None else min(size.cases, MOST_CASES)
    if not 1 <= cases <= most or cases != int(cases):
        raise ValueError(f"expected 1 to {most} cases, found {cases:g}")
    counted = [values[name] for name in ("spacing", "shape", "extent", "kept", "ct", "intensity")]
    if any((each < 0).any() for each in counted) or (values["moments"][:, [0, 2]] < 0).any():
        raise ValueError("expected counts of 0 or more")
    for name in ("spacing", "shape", "extent", "kept"):
        if not (values[name].sum(axis=-1) == cases).all():
            raise ValueError(f"{name}: expected a histogram of {cases:g} cases, found another sum")
    mass, first, second = values["moments"].T
    if values["ct"][0] > cases or (mass > cases).any():
        raise ValueError(f"expected at most {cases:g} cases with CT, and with foreground, found more")
    if not np.allclose(values["intensity"].sum(axis=1), mass, rtol=0, atol=1e-6 * cases):
        raise ValueError("intensity: expected histograms of mass 1 for each case with foreground")
    # Cauchy and Schwarz: a mean square is at least the square of the mean.
    if not (second * mass >= first**2 * (1 - 1e-9)).all():
        raise ValueError("moments: expected a sum and a sum of squares of the same intensities")
    if (np.abs(first) > mass * _MOST_INTENSITY).any() or (second > mass * _MOST_INTENSITY**2).any():
        raise ValueError(
            f"moments: expected Hounsfield units, at most {_MOST_INTENSITY:g} of them, found more"
        )
    _check_lengths(values)


def _check_lengths(values: Mapping[str, NDArray[np.float64]]) -> None:
    """Raise ValueError for lengths that no scanner has, or that contradict each other."""
    sizes = _FIRST * np.exp((np.arange(LENGTHS) + 0.5) * _STEP)
    for name, least, most in (("spacing", 0.0, _MOST_SPACING), ("shape", 1.0, _MOST_VOXELS)):
        there = sizes[values[name].any(axis=0)]
        # A bin has 1 % to either side.
        if there.min() < least * 0.98 or there.max() > most * 1.02:
            raise ValueError(
                f"{name}: expected {least:g} to {most:g}, found {there.min():.3g} to {there.max():.3g}"
            )
    means = {
        name: np.exp(values[name] @ np.log(sizes) / values[name].sum(axis=-1))
        for name in ("spacing", "shape", "extent")
    }
    factor = means["extent"] / (means["spacing"] * means["shape"])
    if (np.abs(np.log(factor)) > math.log(_MOST_FACTOR)).any():
        raise ValueError(
            f"extent: expected about voxels times mm per voxel, found {factor.min():.3g} to "
            f"{factor.max():.3g} times that"
        )


def capped(states: Mapping[str, State]) -> tuple[dict[str, State], str]:
    """The fingerprints of sites, of which none counts more than the others together, and what that changed.

    The median of merged counts is that of the site that has more than half of them. Of three sites and more
    such a site counts as one case less than the others: a median between two halves would still be moved.
    """
    cases = {site: float(state["cases"][0]) for site, state in states.items()}
    largest = max(cases, key=cases.__getitem__, default="")
    others = sum(count for site, count in cases.items() if site != largest)
    if not others or cases[largest] <= others:
        return dict(states), ""
    counted = others if len(states) == 2 else others - 1
    scaled = {name: tensor * (counted / cases[largest]) for name, tensor in states[largest].items()}
    words = (
        f"{largest} announces {cases[largest]:.0f} of {cases[largest] + others:.0f} training cases: "
        f"it counts as {counted:.0f}, half of all at most, so that no site decides a plan alone"
    )
    return {**states, largest: scaled}, words


def summary(merged: Mapping[str, torch.Tensor]) -> Summary:
    """Read the quantities of a plan from the sum of the sites' fingerprints, by axis R, A, S."""
    values = {name: tensor.double().numpy() for name, tensor in merged.items()}

    def by_axis(name: str, share: float) -> tuple[float, ...]:
        return tuple(_quantile(counts, share) for counts in values[name])

    cases = round(values["cases"][0])
    is_ct = 2 * values["ct"][0] > values["cases"][0]
    return Summary(
        cases,
        by_axis("spacing", 0.5),
        by_axis("spacing", 0.1),
        by_axis("shape", 0.5),
        by_axis("extent", 0.5),
        _middle_share(values["kept"]),
        tuple(
            _of_channel(histogram, moments) if is_ct and moments[0] > 0 else None
            for histogram, moments in zip(values["intensity"], values["moments"], strict=True)
        ),
    )


def _quantile(counts: NDArray[np.float64], share: float) -> float:
    """numpy's percentile of the lengths, each of which is the shortest decimal of its bin."""
    place = share * (counts.sum() - 1)
    before, after = math.floor(place), math.ceil(place)
    ends = np.cumsum(counts)
    low, high = (shortest_decimal(int(np.searchsorted(ends, at, side="right"))) for at in (before, after))
    return float(low + (high - low) * (place - before))


def shortest_decimal(bin_: int) -> float:
    """The number with the fewest digits in a bin of lengths: a scanner's 0.7 mm is 0.7 again."""
    low, high = (_FIRST * math.exp((bin_ + end) * _STEP) for end in (0, 1))
    middle = math.sqrt(low * high)
    for digits in range(1, 6):
        step = 10.0 ** (math.floor(math.log10(middle)) + 1 - digits)
        found = float(f"{round(middle / step) * step:.{digits}g}")
        if low * (1 - 1e-9) <= found < high * (1 - 1e-9):
            return found
    return middle


def _middle_share(counts: NDArray[np.float64]) -> float:
    """The median share, at the upper end of its bin: 1 where nothing is cut off."""
    ends = np.cumsum(counts)
    return float(np.searchsorted(ends, ends[-1] / 2) + 1) / SHARES


def _of_channel(histogram: NDArray[np.float64], moments: NDArray[np.float64]) -> Intensities:
    mass, first, second = (float(each) for each in moments)
    mean = first / mass
    std = math.sqrt(max(second / mass - mean**2, 0.0))
    low, median, high = (_intensity(histogram, share) for share in (0.005, 0.5, 0.995))
    return Intensities(low, median, high, mean, std)


def _intensity(histogram: NDArray[np.float64], share: float) -> float:
    """The percentile, linear within its bin."""
    ends = np.cumsum(histogram)
    at = int(np.searchsorted(ends, share * ends[-1]))
    inside = (share * ends[-1] - (ends[at] - histogram[at])) / histogram[at]
    return float(_AIR + (at + inside) * _WIDTH)
