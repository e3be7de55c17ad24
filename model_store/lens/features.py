"""What a scan looks like to the lens: three features of a standardised image, which add up to means.

    field      mean intensity of a grid of 6 cells per axis              shading, anatomy
    spectrum   logarithm of the radial power in 12 bands                 sharpness, noise
    quantiles  of its intensities at 25 levels                           contrast, curve

An image is a network's input after the task's own preparation: a slice, or a whole volume on the network's
grid. Each channel is standardised to mean 0 and deviation 1 first, whatever the task's normalisation.

Shape suffixes: N images, C channels, ... two or three spatial axes, E entries of a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Kind: TypeAlias = Literal["field", "spectrum", "quantiles"]
Images: TypeAlias = NDArray[np.float32]
Feature: TypeAlias = NDArray[np.float64]

CELLS = 6
# Cycles per pixel. No frequency of an image is below a band of its own unless the image is very small.
EDGES = np.geomspace(0.02, 0.5, 13)
CENTRES = np.sqrt(EDGES[1:] * EDGES[:-1])
LEVELS = np.array(
    [0.005, 0.01, 0.02, 0.05, *(0.1 + 0.05 * step for step in range(17)), 0.95, 0.98, 0.99, 0.995]
)
# A deviation that is as good as none, and a power that is.
_FLAT = 1e-6
_NO_POWER = 1e-12
# Values of a channel that quantiles are taken of, evenly spaced.
_MOST_VALUES = 2**18


def standardised(images_NC: Images) -> tuple[Images, Feature, Feature]:
    """Each channel of each image with mean 0 and deviation 1, its mean and its deviation [N, C, 1...].

    A constant channel is 0 everywhere.
    """
    axes = tuple(range(2, images_NC.ndim))
    mean = images_NC.mean(axis=axes, keepdims=True, dtype=np.float64)
    centred = images_NC - mean.astype(np.float32)
    # Of the centred values, since float32 squares of large ones lose their differences.
    deviation = np.sqrt(np.square(centred).mean(axis=axes, keepdims=True, dtype=np.float64))
    centred /= np.maximum(deviation, _FLAT).astype(np.float32)
    return centred, mean, deviation


def field_of(images_NC: Images) -> Feature:
    """Means of the cells [N, C, CELLS^axes], which overlap where a side is no multiple of them."""
    found = images_NC.astype(np.float64)
    for axis, side in enumerate(images_NC.shape[2:], start=2):
        found = np.moveaxis(np.tensordot(found, pooling(side), axes=(axis, 1)), -1, axis)
    return found.reshape(*images_NC.shape[:2], -1)


def spectrum_of(images_NC: Images) -> Feature:
    """Logarithms of the mean power in bands of the radius [N, C, bands], of the image in a Hann window.

    A band without a frequency, of a small image, has what lies between its neighbours.
    """
    from scipy import fft

    sides = images_NC.shape[2:]
    axes = tuple(range(2, images_NC.ndim))
    window = reduce(np.multiply.outer, [_hann(side) for side in sides])
    bands, there = _bands(sides)
    found = np.empty((*images_NC.shape[:2], len(CENTRES)))
    total = np.square(window).sum()
    for image, row in zip(images_NC, found, strict=True):
        seen = fft.rfftn(image * window.astype(np.float32), axes=tuple(axis - 1 for axis in axes))
        power = np.square(seen.real, dtype=np.float64) + np.square(seen.imag, dtype=np.float64)
        for channel, own in zip(power, row, strict=True):
            sums = np.bincount(bands.ravel(), channel.ravel(), minlength=len(CENTRES) + 2)[1:-1]
            logarithms = np.log(np.maximum(sums[there.mask] / there.counts / total, _NO_POWER))
            own[:] = np.interp(np.log(CENTRES), there.places, logarithms)
    return found


def quantiles_of(images_NC: Images) -> Feature:
    """Quantiles at `LEVELS` [N, C, levels], linear between values."""
    flat = images_NC.reshape(*images_NC.shape[:2], -1)
    flat = flat[..., :: -(-flat.shape[-1] // _MOST_VALUES)]
    found: Feature = np.moveaxis(np.quantile(flat, LEVELS, axis=-1), 0, -1).astype(np.float64)
    return found


FEATURES: Mapping[Kind, Callable[[Images], Feature]] = {
    "field": field_of,
    "spectrum": spectrum_of,
    "quantiles": quantiles_of,
}


def entries_of(kind: Kind, axes: int) -> int:
    """The number of entries of a feature of images with so many spatial axes."""
    counts: Mapping[Kind, int] = {"field": CELLS**axes, "spectrum": len(CENTRES), "quantiles": len(LEVELS)}
    return counts[kind]


@lru_cache(maxsize=64)
def pooling(side: int) -> Feature:
    """The matrix [CELLS, side] of the means of cells: adaptive average pooling."""
    found = np.zeros((CELLS, side))
    for cell in range(CELLS):
        first, last = cell * side // CELLS, -(-(cell + 1) * side // CELLS)
        found[cell, first:last] = 1 / (last - first)
    return found


@lru_cache(maxsize=64)
def upsampling(side: int) -> Feature:
    """The matrix [side, CELLS] that interpolates cells linearly, constant beyond the outer centres."""
    places = np.clip((np.arange(side) + 0.5) * CELLS / side - 0.5, 0, CELLS - 1)
    found: Feature = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(CELLS)))
    return found


def radius(sides: Sequence[int]) -> Feature:
    """Cycles per pixel of every coefficient of `rfftn`."""
    squares: Feature = np.square(np.fft.rfftfreq(sides[-1]))
    for side in reversed(sides[:-1]):
        squares = np.add.outer(np.square(np.fft.fftfreq(side)), np.zeros(squares.shape)) + squares
    found: Feature = np.sqrt(squares)
    return found


class _There:
    """The bands that an image's frequencies lie in: which, logarithms of their centres, and how many each."""

    def __init__(self, bands: NDArray[np.int64]) -> None:
        counts = np.bincount(bands.ravel(), minlength=len(CENTRES) + 2)[1:-1]
        self.mask = counts > 0
        self.counts = counts[self.mask]
        self.places = np.log(CENTRES[self.mask])


@lru_cache(maxsize=8)
def _bands(sides: tuple[int, ...]) -> tuple[NDArray[np.int64], _There]:
    """The band of every coefficient, 1 to the number of bands; 0 and the next are below and above them."""
    found = np.searchsorted(EDGES, radius(sides))
    return found, _There(found)


@lru_cache(maxsize=64)
def _hann(side: int) -> Feature:
    return np.hanning(side) if side > 2 else np.ones(side)
