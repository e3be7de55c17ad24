"""The lens: four steps before a network that move a hospital's scans towards what the network was trained on.

    1. polarity   x <- -x                                          scans that are inverted
    2. field      x <- x - d, interpolated from cells              shading
    3. spectrum   gain exp(g) by the radius, 1 where it is lowest  sharpness and noise
    4. curve      from the cohort's quantiles to the members'      contrast

It sees no weight, so that it serves any network. An image is standardised before the first step and after
each; at the end it has its own mean and deviation again, so that a task's own normalisation holds. A lens is
of one hospital (`model_store.lens.fit`); for a scan alone one is made as the scan comes.

Shape suffixes: N images, C channels, ... two or three spatial axes.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from model_store.lens.features import (
    CELLS,
    CENTRES,
    LEVELS,
    Feature,
    Images,
    Kind,
    radius,
    standardised,
    upsampling,
)

FILE: Final = "lens.json"
# The spectrum's gain stays within these factors.
GAINS: Final = (0.5, 3.0)
# Quantiles that are nearer than this are drawn apart, so that a curve is one.
_APART = 1e-4

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
        negated: whether the first step is taken.
        field: per channel, what is subtracted, in deviations of an image: CELLS^axes cells.
        spectrum: the logarithm of the gain at the centres of the bands, the same for all channels.
        curve: per channel.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["locum-lens/1"] = "locum-lens/1"
    axes: Literal[2, 3]
    channels: int = Field(ge=1, le=256)
    negated: bool = False
    field: tuple[Row, ...] | None = None
    spectrum: Row | None = Field(None, min_length=len(CENTRES), max_length=len(CENTRES))
    curve: tuple[Curve, ...] | None = None

    @model_validator(mode="after")
    def _of_its_shapes(self) -> Lens:
        cells = CELLS**self.axes
        if self.field is not None and [len(row) for row in self.field] != [cells] * self.channels:
            raise ValueError(f"field: expected {cells} cells for each of {self.channels} channels")
        if self.curve is not None and len(self.curve) != self.channels:
            raise ValueError(f"curve: expected {self.channels} channels, found {len(self.curve)}")
        low, high = np.log(GAINS)
        if self.spectrum is not None and not all(low - 1e-9 <= g <= high + 1e-9 for g in self.spectrum):
            raise ValueError(f"spectrum: expected gains within {GAINS}")
        return self

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

    def apply(self, images_NC: Images) -> Images:
        """The images [N, C, ...] through the lens, a new array. A constant channel stays as it is.

        Raises ValueError for images of another number of channels or axes.
        """
        if images_NC.shape[1] != self.channels or images_NC.ndim != 2 + self.axes:
            raise ValueError(
                f"expected images of {self.channels} channels and {self.axes} axes, found "
                f"{list(images_NC.shape)}"
            )
        found = np.empty(images_NC.shape, np.float32)
        for image, seen in zip(images_NC, found, strict=True):
            self._apply_one(image, seen)
        return found

    def _apply_one(self, image_C: NDArray[np.float32], found_C: NDArray[np.float32]) -> None:
        """One image, each channel apart, so that the memory is that of a channel."""
        for channel, (image, found) in enumerate(zip(image_C, found_C, strict=True)):
            x, mean, deviation = standardised(image[np.newaxis, np.newaxis])
            if not deviation.item():
                found[...] = image
                continue
            if self.negated:
                np.negative(x, out=x)
            x = x[0, 0]
            if self.field is not None:
                x -= _interpolated(np.array(self.field[channel]), x.shape)
                x = _again(x)
            if self.spectrum is not None:
                _filter(x, self.spectrum)
                x = _again(x)
            if self.curve is not None:
                x = _again(_curved(x, self.curve[channel]))
            found[...] = x * np.float32(deviation.item()) + np.float32(mean.item())

    def to_bytes(self) -> bytes:
        """As JSON; equal lenses give equal bytes."""
        return (self.model_dump_json(indent=1) + "\n").encode()


def rising(quantiles: Feature) -> Feature:
    """The quantiles, drawn apart where they are equal: of an image with an empty background many are."""
    found = quantiles.copy()
    for index in range(1, len(found)):
        found[index] = max(found[index], found[index - 1] + _APART)
    return found


def _again(x: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = standardised(x[np.newaxis, np.newaxis])[0][0, 0]
    return found


def _interpolated(cells: Feature, sides: tuple[int, ...]) -> NDArray[np.float32]:
    found = cells.reshape((CELLS,) * len(sides))
    for axis, side in enumerate(sides):
        found = np.moveaxis(np.tensordot(upsampling(side), found, axes=(1, axis)), 0, axis)
    return found.astype(np.float32)


def _filter(x: NDArray[np.float32], spectrum: Row) -> None:
    """Multiply the coefficients of a channel, in place; its mean stays."""
    from scipy import fft

    seen = fft.rfftn(x, overwrite_x=True)
    seen *= gain_of(spectrum, x.shape)
    x[...] = fft.irfftn(seen, s=x.shape, overwrite_x=True)


@lru_cache(maxsize=4)
def gain_of(spectrum: Row, sides: tuple[int, ...]) -> NDArray[np.float32]:
    """The gain of every coefficient of `rfftn`: linear in the logarithm of the radius, 1 of the mean."""
    places = np.log(np.maximum(radius(sides), 1e-6))
    gain = np.exp(np.interp(places, np.log(CENTRES), spectrum)).astype(np.float32)
    gain[(0,) * len(sides)] = 1
    return gain


def _curved(x: NDArray[np.float32], curve: Curve) -> NDArray[np.float32]:
    """Linear between the quantiles, and shifted beyond the outer ones."""
    source, target = np.array(curve.source), np.array(curve.target)
    inside = np.interp(x, source, target)
    inside += np.minimum(x - source[0], 0) + np.maximum(x - source[-1], 0)
    found: NDArray[np.float32] = inside.astype(np.float32)
    return found
