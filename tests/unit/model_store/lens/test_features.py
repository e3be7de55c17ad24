"""The features of a scan, against torch's pooling, a plain loop over frequencies, and numpy's quantiles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import adaptive_avg_pool2d, adaptive_avg_pool3d

from model_store.lens.features import (
    CENTRES,
    EDGES,
    LEVELS,
    entries_of,
    field_of,
    quantiles_of,
    spectrum_of,
    standardised,
)


def images(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(3, 2, shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(2, 1, 48, 48), (2, 3, 37, 50), (1, 1, 5, 64), (2, 1, 12, 20, 17)])
def test_the_field_is_adaptive_average_pooling(shape: tuple[int, ...]) -> None:
    x = images(*shape)
    pool = adaptive_avg_pool2d if len(shape) == 4 else adaptive_avg_pool3d
    expected = pool(torch.from_numpy(x).double(), 6).flatten(2).numpy()
    np.testing.assert_allclose(field_of(x), expected, atol=1e-12)
    assert expected.shape[2] == entries_of("field", len(shape) - 2)


@pytest.mark.parametrize("shape", [(48, 40), (33, 31), (16, 12, 20)])
def test_the_spectrum_is_the_mean_power_of_the_coefficients_in_each_band(shape: tuple[int, ...]) -> None:
    x = images(1, 1, *shape)
    windows = np.meshgrid(*(np.hanning(side) for side in shape), indexing="ij")
    window = np.prod(windows, axis=0)
    power = np.abs(np.fft.fftn(x[0, 0] * window)) ** 2 / (window**2).sum()
    sums: dict[int, list[float]] = {}
    for place in np.ndindex(*shape[:-1], shape[-1] // 2 + 1):
        cycles = [min(k, side - k) / side for k, side in zip(place, shape, strict=True)]
        radius = math.sqrt(sum(c * c for c in cycles))
        band = next((b for b in range(12) if EDGES[b] < radius <= EDGES[b + 1]), None)
        if band is not None:
            sums.setdefault(band, []).append(float(power[place]))
    found = spectrum_of(x)[0, 0]
    for band, values in sums.items():
        assert found[band] == pytest.approx(math.log(np.mean(values)), abs=1e-4)
    empty = [band for band in range(12) if band not in sums]
    there = sorted(sums)
    expected = np.interp(np.log(CENTRES[empty]), np.log(CENTRES[there]), found[there])
    np.testing.assert_allclose(found[empty], expected, atol=1e-9)


def test_quantiles_are_numpys() -> None:
    x = images(2, 2, 31, 29)
    for image, found in zip(x, quantiles_of(x), strict=True):
        for channel, own in zip(image, found, strict=True):
            np.testing.assert_allclose(own, np.quantile(channel, LEVELS), atol=1e-6)
    np.testing.assert_allclose(LEVELS, 1 - LEVELS[::-1], atol=1e-12)


def test_an_image_is_standardised_whatever_its_offset() -> None:
    x = images(2, 2, 40, 40) * np.float32(1e-2) + np.float32(100)
    found, mean, deviation = standardised(x)
    np.testing.assert_allclose(found.mean(axis=(2, 3)), 0, atol=1e-3)
    np.testing.assert_allclose(found.std(axis=(2, 3)), 1, atol=1e-3)
    np.testing.assert_allclose(found * deviation + mean, x, rtol=1e-6)
    assert not standardised(np.full((1, 1, 8, 8), 7, np.float32))[0].any()
