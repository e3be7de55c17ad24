"""Convert a scan's channels and intensities to those that the network was trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.errors import ScanMismatch
from model_store.scans.types import Scan
from model_store.task import Normalisation, Task

# ITU-R BT.601, which Pillow and most viewers use to convert colour to grey.
_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)

# A standard deviation that rounding alone can give a constant image, relative to its level.
CONSTANT = 1e-6


def is_grey(voxels: NDArray[Any]) -> bool:
    """Whether voxels [..., C] are grey: one channel, or three equal ones (as some programs save grey)."""
    return voxels.shape[-1] == 1 or bool(
        np.array_equal(voxels[..., 0], voxels[..., 1]) and np.array_equal(voxels[..., 1], voxels[..., 2])
    )


def match_channels(scan: Scan, task: Task) -> NDArray[Any]:
    """Convert the voxels to the task's number of channels, by its `colour` policy.

    Grey saved as RGB (three equal channels) is converted to grey under every policy, because no information
    is lost. Raises ScanMismatch.
    """
    voxels = scan.voxels
    found, expected = scan.channels, task.channel_count
    if found == expected:
        return voxels
    if found == 3 and expected == 1:
        if is_grey(voxels):
            return voxels[..., :1]
        if task.colour == "luminance":
            return (voxels.astype(np.float32) @ _LUMINANCE)[..., None]
    if found == 1 and expected == 3 and task.colour == "replicate":
        return np.broadcast_to(voxels, (*voxels.shape[:-1], 3))
    names = {1: "grey", 3: "colour"}
    raise ScanMismatch(
        f"task '{task.name}' expects a {names[expected]} scan ({expected} channels), "
        f"found {names.get(found, 'several files')} ({found} channels); send a {names[expected]} scan"
    )


@dataclass(frozen=True)
class Scale:
    """A normalisation: clip to [low, high], then (x - shift) * factor."""

    low: float
    high: float
    shift: float
    factor: float

    def apply(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Normalise values of any type and shape to float32 of the same shape."""
        scaled = values.astype(np.float32)
        if math.isfinite(self.low) or math.isfinite(self.high):
            np.clip(scaled, self.low, self.high, out=scaled)
        if self.shift:
            # In two steps, because the float32 rounding of the mean of a 16-bit scan at a high level can be a
            # visible part of its contrast.
            coarse = np.float32(self.shift)
            scaled -= coarse
            scaled -= np.float32(self.shift - float(coarse))
        if self.factor != 1:
            scaled *= np.float32(self.factor)
        return scaled


def scale_of(parts: Sequence[NDArray[Any]], normalisation: Normalisation) -> Scale:
    """Compute the normalisation of all values in `parts` together: an image, or a volume's slices in order.

    No part may be empty. Moments are merged part by part in float64 (Chan, Golub and LeVeque, 1979). So a
    volume is not copied (but for percentiles of more than 16 bits), and the result does not depend on the
    file's stored axis order.
    """
    low, high = normalisation.window or (-math.inf, math.inf)
    if not parts:
        return Scale(low, high, 0.0, 0.0)
    if normalisation.percentiles is not None:
        low, high = _percentiles(parts, low, high, normalisation.percentiles)
    if normalisation.method == "none":
        return Scale(low, high, 0.0, 1.0)
    if normalisation.method == "minmax":
        ends = [value for part in parts for value in (float(part.min()), float(part.max()))]
        least, most = np.clip([min(ends), max(ends)], low, high).tolist()
        span = most - least
        return Scale(low, high, least, 1 / span if span > CONSTANT * abs(least) else 0.0)
    mean, deviation = moments_of(parts, low, high)
    constant = deviation <= CONSTANT * max(abs(mean), 1e-30)
    return Scale(low, high, mean, 0.0 if constant else 1 / deviation)


def moments_of(
    parts: Iterable[NDArray[Any]], low: float = -math.inf, high: float = math.inf
) -> tuple[float, float]:
    """Mean and standard deviation of the clipped values of all parts, none of them empty."""
    clipped = math.isfinite(low) or math.isfinite(high)
    count, mean, squares = 0, 0.0, 0.0
    for part in parts:
        values = part.astype(np.float32)
        if clipped:
            np.clip(values, low, high, out=values)
        own = float(values.mean(dtype=np.float64))
        values -= np.float32(own)
        # The subtraction above rounds the mean; subtract the remaining mean from the squares.
        rest = float(values.mean(dtype=np.float64))
        flat = values.ravel().astype(np.float64)
        # Not a dot product, because BLAS would use several threads: their number could change the result, and
        # they cost more time than they save.
        own_squares = float(np.square(flat, out=flat).sum()) - rest * rest * flat.size
        delta = own - mean
        total = count + flat.size
        squares += own_squares + delta * delta * count * flat.size / total
        mean += delta * flat.size / total
        count = total
    return mean, math.sqrt(max(squares, 0.0) / count)


def _percentiles(
    parts: Sequence[NDArray[Any]], low: float, high: float, wanted: tuple[float, float]
) -> tuple[float, float]:
    """Compute np.percentile (linear) of the clipped values. 8 and 16 bit integers are counted, not sorted."""
    dtype = parts[0].dtype
    if dtype.kind in "iu" and dtype.itemsize <= 2:
        ranges = [(int(part.min()), int(part.max())) for part in parts]
        least = min(first for first, _ in ranges)
        size = max(last for _, last in ranges) - least + 1
        counts = np.zeros(size, np.int64)
        for part in parts:
            counts += np.bincount(part.ravel().astype(np.int64) - least, minlength=size)
        cumulative = np.cumsum(counts)
        ends = []
        for percent in wanted:
            position = percent / 100 * (int(cumulative[-1]) - 1)
            below = math.floor(position)
            pair = (
                np.searchsorted(cumulative, [below, min(below + 1, cumulative[-1] - 1)], side="right") + least
            )
            first, second = np.clip(pair.astype(np.float64), low, high)
            ends.append(float(first + (second - first) * (position - below)))
        return ends[0], ends[1]
    values = np.concatenate([part.ravel() for part in parts]).astype(np.float32)
    np.clip(values, low, high, out=values)
    first, second = np.percentile(values, wanted, overwrite_input=True)
    return float(first), float(second)
