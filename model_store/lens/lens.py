"""The lens: four steps before a network that move a hospital's scans towards what the network was trained on.

    1. polarity   x <- -x, of a scan that lies the other way round  scans that are inverted
    2. field      x <- x - d, interpolated from cells              shading
    3. spectrum   gain exp(g) by the radius, 1 where it is lowest  noise
    4. curve      from the cohort's quantiles to the members'      contrast

It sees no weight, so that it serves any network. An image is standardised before the first step and after
each; at the end it has its own mean and deviation again, so that a task's own normalisation holds. A lens is
of one hospital (`model_store.lens.fit`); for a scan alone one is made as the scan comes.

Shape suffixes: N images, C channels, ... two or three spatial axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from model_store.lens.features import (
    CELLS,
    CENTRES,
    FLAT,
    LEVELS,
    Feature,
    Images,
    Kind,
    correlation,
    field_of,
    radius,
    standardised,
    upsampling,
)
from model_store.preprocessing.forward import no_look

FILE: Final = "lens.json"
# The spectrum's gain stays within these factors. It only damps: what a blur took is lost, and a gain above 1
# brings noise, which cost phantoms that were not left alone 5 to 40 points of Dice.
GAINS: Final = (0.25, 1.0)
# Quantiles that are nearer than this are drawn apart, so that a curve is one.
_APART = 1e-4
# In deviations: no value of a standardised image of 2^28 voxels is farther away.
_FAR = 2.0**15

Row = tuple[FiniteFloat, ...]


class Curve(BaseModel):
    """Quantiles of one channel at `LEVELS`: of the hospital's scans, and what they become."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Row = Field(min_length=len(LEVELS), max_length=len(LEVELS))
    target: Row = Field(min_length=len(LEVELS), max_length=len(LEVELS))

    @model_validator(mode="after")
    def _rises(self) -> Curve:
        if any(b <= a for row in (self.source, self.target) for a, b in itertools.pairwise(row)):
            raise ValueError("curve: expected quantiles that rise")
        return self


class Lens(BaseModel):
    """The steps of one hospital; a step that does nothing is absent. All channels have the same steps.

    Attributes:
        axes: 2 of slices, 3 of volumes, each of which is seen as a whole.
        channels: of the images.
        upright: per channel the members' mean field, where the first step is taken: a scan is negated if its
            own mean field correlates negatively with it. A hospital may send scans of both kinds.
        field: per channel, what is subtracted, in deviations of an image: CELLS^axes cells.
        spectrum: the logarithm of the gain at the centres of the bands, the same for all channels.
        curve: per channel.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["locum-lens/1"] = "locum-lens/1"
    axes: Literal[2, 3]
    channels: int = Field(ge=1, le=256)
    upright: tuple[Row, ...] | None = None
    field: tuple[Row, ...] | None = None
    spectrum: Row | None = Field(None, min_length=len(CENTRES), max_length=len(CENTRES))
    curve: tuple[Curve, ...] | None = None

    @model_validator(mode="after")
    def _of_its_shapes(self) -> Lens:
        cells = CELLS**self.axes
        for name, rows in (("upright", self.upright), ("field", self.field)):
            if rows is not None and [len(row) for row in rows] != [cells] * self.channels:
                raise ValueError(f"{name}: expected {cells} cells for each of {self.channels} channels")
        if self.curve is not None and len(self.curve) != self.channels:
            raise ValueError(f"curve: expected {self.channels} channels, found {len(self.curve)}")
        low, high = np.log(GAINS)
        if self.spectrum is not None and not all(low - 1e-9 <= g <= high + 1e-9 for g in self.spectrum):
            raise ValueError(f"spectrum: expected gains within {GAINS}")
        return self

    @property
    def negated(self) -> bool:
        """Whether scans that are inverted are negated."""
        return self.upright is not None

    @property
    def steps(self) -> tuple[Literal["polarity"] | Kind, ...]:
        """The names of its steps."""
        there: dict[Literal["polarity"] | Kind, bool] = {
            "polarity": self.negated,
            "field": self.field is not None,
            "spectrum": self.spectrum is not None,
            "quantiles": self.curve is not None,
        }
        return tuple(name for name, is_there in there.items() if is_there)

    def apply(
        self,
        images_NC: Images,
        out: Images | None = None,
        look: Callable[[], None] = no_look,
        scans: Sequence[Hashable] | None = None,
    ) -> Images:
        """The images [N, C, ...] through the lens. A constant channel stays as it is.

        The answer is a new array, or `out`, which may be the images themselves. Beside it the work takes the
        memory of two channels of an image, and of a plane. `look` is called before each channel of an image;
        what it raises ends the work. `scans` has the scan of each image; without it all are one.

        Raises ValueError for images of another number of channels or axes.
        """
        if images_NC.shape[1] != self.channels or images_NC.ndim != 2 + self.axes:
            raise ValueError(
                f"expected images of {self.channels} channels and {self.axes} axes, found "
                f"{list(images_NC.shape)}"
            )
        found = images_NC.astype(np.float32) if out is None else out
        if out is not None and out is not images_NC:
            found[...] = images_NC
        inverted = self._inverted(found, [0] * len(found) if scans is None else scans, look)
        for image, negate in zip(found, inverted, strict=True):
            for channel, x in enumerate(image):
                look()
                self._change(x, channel, negate=negate)
        return found

    def _inverted(self, images_NC: Images, scans: Sequence[Hashable], look: Callable[[], None]) -> list[bool]:
        """Whether the scan of each image lies the other way round."""
        if self.upright is None:
            return [False] * len(images_NC)
        sums: dict[Hashable, Feature] = {}
        for scan, image in zip(scans, images_NC, strict=True):
            look()
            x, _, deviation = standardised(image[np.newaxis])
            if deviation.all():
                sums[scan] = sums.get(scan, 0.0) + field_of(x)[0]
        found = {scan: correlation(total, np.array(self.upright)) < 0 for scan, total in sums.items()}
        return [found.get(scan, False) for scan in scans]

    def _change(self, x: NDArray[np.float32], channel: int, *, negate: bool) -> None:
        """One channel of an image, in place."""
        mean, deviation = _standardise(x)
        if negate:
            np.negative(x, out=x)
        if not deviation:
            x[...] = mean
            return
        if self.field is not None:
            _subtract(x, np.array(self.field[channel]))
            _standardise(x)
        if self.spectrum is not None:
            _filter(x, self.spectrum)
            _standardise(x)
        if self.curve is not None:
            _bend(x, self.curve[channel])
            _standardise(x)
        x *= np.float32(deviation)
        x += np.float32(mean)

    def to_bytes(self) -> bytes:
        """As JSON; equal lenses give equal bytes."""
        return (self.model_dump_json(indent=1) + "\n").encode()


def rising(quantiles: Feature) -> Feature:
    """The quantiles, drawn apart where they are equal: of an image with an empty background many are."""
    found = quantiles.copy()
    for index in range(1, len(found)):
        found[index] = max(found[index], found[index - 1] + _APART)
    return found


def _planes(x: NDArray[np.float32]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """The planes of a volume along its first axis; a slice is one."""
    return enumerate(x if x.ndim > 2 else x[np.newaxis])


def _standardise(x: NDArray[np.float32]) -> tuple[float, float]:
    """Give a channel mean 0 and deviation 1, in place. Returns its own; a constant one becomes 0."""
    mean = float(x.mean(dtype=np.float64))
    x -= np.float32(mean)
    # What rounding of the mean leaves is none of the deviation.
    rest, squares = float(x.mean(dtype=np.float64)), 0.0
    for _, plane in _planes(x):
        squares += float(np.square(plane).sum(dtype=np.float64))
    deviation = math.sqrt(max(squares / x.size - rest**2, 0.0))
    x /= np.float32(max(deviation, FLAT))
    return mean, deviation


def _subtract(x: NDArray[np.float32], cells: Feature) -> None:
    """Subtract cells, interpolated linearly."""
    found = cells.reshape((CELLS,) * x.ndim)
    rows, columns = (upsampling(side) for side in x.shape[-2:])
    first = found[np.newaxis] if x.ndim == 2 else np.tensordot(upsampling(x.shape[0]), found, axes=1)
    for index, plane in _planes(x):
        plane -= (rows @ first[index] @ columns.T).astype(np.float32)


def _filter(x: NDArray[np.float32], spectrum: Row) -> None:
    """Multiply the coefficients of a channel; its mean stays."""
    from scipy import fft

    seen = fft.rfftn(x)
    if x.ndim == 2:
        seen *= _gain(spectrum, x.shape)
    else:
        others = np.square(radius(x.shape[1:]))
        for index, (plane, cycles) in enumerate(zip(seen, np.fft.fftfreq(len(x)), strict=True)):
            plane *= gain_of(np.sqrt(others + cycles**2), spectrum, first=not index)
    x[...] = fft.irfftn(seen, s=x.shape, overwrite_x=True)


@lru_cache(maxsize=4)
def _gain(spectrum: Row, sides: tuple[int, int]) -> NDArray[np.float32]:
    return gain_of(radius(sides), spectrum, first=True)


def gain_of(radii: Feature, spectrum: Row, *, first: bool) -> NDArray[np.float32]:
    """Linear in the logarithm of the radius; 1 of the mean, which is in the `first` plane."""
    places = np.log(np.maximum(radii, 1e-6))
    gain: NDArray[np.float32] = np.exp(np.interp(places, np.log(CENTRES), spectrum)).astype(np.float32)
    if first:
        gain[(0,) * gain.ndim] = 1
    return gain


def _bend(x: NDArray[np.float32], curve: Curve) -> None:
    """Linear between the quantiles, and shifted beyond the outer ones."""
    source, target = np.array(curve.source), np.array(curve.target)
    # A point far beyond either end, so that what is outside is shifted.
    source = np.concatenate([[source[0] - _FAR], source, [source[-1] + _FAR]])
    target = np.concatenate([[target[0] - _FAR], target, [target[-1] + _FAR]])
    for _, plane in _planes(x):
        plane[...] = np.interp(plane, source, target)
