"""What a scan looks like to the lens: three features of a standardised image, which add up to means.

    field      mean intensity of a grid of 6 cells per axis              shading, anatomy
    spectrum   logarithm of the radial power in 12 bands                 sharpness, noise
    quantiles  of its intensities at 25 levels                           contrast, curve

An image is a network's input after the task's own preparation: a slice, or a whole volume on the network's
grid. Each channel is standardised to mean 0 and deviation 1 first, whatever the task's normalisation.

Shape suffixes: N images, C channels, ... two or three spatial axes, E entries of a feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Kind: TypeAlias = Literal["field", "spectrum", "quantiles"]
Images: TypeAlias = NDArray[np.float32]
Feature: TypeAlias = NDArray[np.float64]

CELLS = 6
# Borders of the bands, in cycles per pixel.
EDGES = np.geomspace(0.02, 0.5, 13)
CENTRES = np.sqrt(EDGES[1:] * EDGES[:-1])
LEVELS = np.array(
    [0.005, 0.01, 0.02, 0.05, *(0.1 + 0.05 * step for step in range(17)), 0.95, 0.98, 0.99, 0.995]
)
# A deviation that is as good as none, and a power that is.
FLAT = 1e-6
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
    # Centred values, since float32 squares of large ones lose their differences.
    deviation = np.sqrt(np.square(centred).mean(axis=axes, keepdims=True, dtype=np.float64))
    centred /= np.maximum(deviation, FLAT).astype(np.float32)
    return centred, mean, deviation


def field_of(images_NC: Images) -> Feature:
    """Means of the cells [N, C, CELLS^axes], which overlap where a side is no multiple of them."""
    found = np.empty((*images_NC.shape[:2], CELLS ** (images_NC.ndim - 2)))
    for image, row in zip(images_NC, found, strict=True):
        for x, own in zip(image, row, strict=True):
            own[:] = _cells(x).ravel()
    return found


def _cells(x: NDArray[np.float32]) -> Feature:
    if x.ndim == 3:
        found: Feature = np.tensordot(pooling(len(x)), np.stack([_cells(plane) for plane in x]), axes=1)
    else:
        rows, columns = (pooling(side) for side in x.shape)
        found = rows @ x @ columns.T
    return found


def spectrum_of(images_NC: Images) -> Feature:
    """Logarithms of the mean power in bands of the radius [N, C, bands], of the image in a Hann window.

    A band without a frequency, of a small image, has what lies between its neighbours.
    """
    found = np.empty((*images_NC.shape[:2], len(CENTRES)))
    for image, row in zip(images_NC, found, strict=True):
        for x, own in zip(image, row, strict=True):
            own[:] = _spectrum(x)
    return found


def _spectrum(x: NDArray[np.float32]) -> Feature:
    from scipy import fft

    windows = [_hann(side) for side in x.shape]
    plane = np.multiply.outer(windows[-2], windows[-1]).astype(np.float32)
    seen = x * plane
    if x.ndim == 3:
        seen *= windows[0].astype(np.float32)[:, None, None]
    coefficients = fft.rfftn(seen, overwrite_x=True)
    sums, counts = np.zeros((2, len(CENTRES) + 2))
    # Plane by plane, since the powers of a volume need twice its memory.
    for power, bands in _powers(coefficients, x.shape):
        sums += np.bincount(bands.ravel(), power.ravel(), minlength=len(sums))
        counts += np.bincount(bands.ravel(), minlength=len(counts))
    sums, counts = sums[1:-1], counts[1:-1]
    there = counts > 0
    total = math.prod(float(np.square(window).sum()) for window in windows)
    logarithms = np.log(np.maximum(sums[there] / counts[there] / total, _NO_POWER))
    return np.interp(np.log(CENTRES), np.log(CENTRES[there]), logarithms)


def _powers(
    coefficients: NDArray[np.complex64], sides: tuple[int, ...]
) -> Iterator[tuple[Feature, NDArray[np.int64]]]:
    """The power of each plane of coefficients, and the bands: 0 and the last are below and above all."""
    if len(sides) == 2:
        yield _power(coefficients), _bands(sides)
        return
    others = np.square(radius(sides[1:]))
    for plane, cycles in zip(coefficients, np.fft.fftfreq(sides[0]), strict=True):
        yield _power(plane), np.searchsorted(EDGES, np.sqrt(others + cycles**2))


def _power(coefficients: NDArray[np.complex64]) -> Feature:
    real: Feature = np.square(coefficients.real, dtype=np.float64)
    return real + np.square(coefficients.imag, dtype=np.float64)


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


def as_rows(values_CE: Feature) -> tuple[tuple[float, ...], ...]:
    """The values as a file has them."""
    return tuple(tuple(map(float, row)) for row in values_CE)


def correlation(one: Feature, other: Feature) -> float:
    """Compute Pearson's correlation of all entries; 0 where one has no spread."""
    one, other = one.ravel() - one.mean(), other.ravel() - other.mean()
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(np.clip(one @ other / lengths, -1, 1)) if lengths > FLAT else 0.0


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


@lru_cache(maxsize=8)
def _bands(sides: tuple[int, ...]) -> NDArray[np.int64]:
    return np.searchsorted(EDGES, radius(sides))


@lru_cache(maxsize=64)
def _hann(side: int) -> Feature:
    return np.hanning(side) if side > 2 else np.ones(side)
