"""Channels, clipping and scaling, compared with NumPy formulas on the whole array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from model_store.errors import ScanMismatch
from model_store.preprocessing import prepare
from model_store.scan import Scan
from model_store.task import Normalisation, Task


def task(size: tuple[int, int] = (32, 16), **more: Any) -> Task:
    normalisation = Normalisation(**more.pop("normalisation", {}))
    return Task(name="t", labels={"a": (1,)}, size=size, normalisation=normalisation, **more)


def image(pixels: NDArray[Any]) -> Scan:
    return Scan(pixels if pixels.ndim == 3 else pixels[..., None], None, "png")


def volume(voxels: NDArray[Any]) -> Scan:
    """[I, J, K] in LPS, so that slice k of an axial task is voxels[:, :, k].T"""
    return Scan(voxels[..., None], np.diag([-1.0, -1.0, 1.0, 1.0]), "nifti")


def reference(values: NDArray[Any], method: str, window: Any, percentiles: Any) -> NDArray[np.float64]:
    x = values.astype(np.float64)
    if window:
        x = x.clip(*window)
    if percentiles:
        x = x.clip(*np.percentile(x, percentiles))
    if method == "zscore":
        return (x - x.mean()) / x.std()
    if method == "minmax":
        return (x - x.min()) / (x.max() - x.min())
    return x


@given(
    dtype=st.sampled_from(["u1", "i2", "u2", "i4", "f4", "f8"]),
    method=st.sampled_from(["zscore", "minmax", "none"]),
    window=st.sampled_from([None, (10.0, 90.0)]),
    percentiles=st.sampled_from([None, (1.0, 99.0), (0.0, 37.5)]),
    scope=st.sampled_from(["image", "volume"]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_normalisation_matches_the_numpy_formula(
    dtype: str, method: str, window: Any, percentiles: Any, scope: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    voxels = (rng.gamma(2.0, 20.0, (16, 32, 3)) + np.arange(3) * 20).clip(0, 250).astype(dtype)
    this = task(
        normalisation={"method": method, "window": window, "percentiles": percentiles, "scope": scope}
    )
    slices = prepare(volume(voxels), this).slices
    for k in range(3):
        if scope == "volume":
            expected = reference(voxels, method, window, percentiles)[:, :, k].T
        else:
            expected = reference(voxels[:, :, k], method, window, percentiles).T
        np.testing.assert_allclose(slices[k, 0], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("method", ["zscore", "minmax"])
@pytest.mark.parametrize("value", [0, 7, 0.1, -1e6, 12345.678])
def test_normalising_a_constant_image_gives_zeros(method: str, value: float) -> None:
    pixels = np.full((32, 16), value, np.float32)
    slices = prepare(image(pixels), task(normalisation={"method": method})).slices
    np.testing.assert_array_equal(slices, 0)


@pytest.mark.parametrize("window", [(100.0, 200.0), (-20.0, -10.0)])
@pytest.mark.parametrize("method", ["zscore", "minmax"])
def test_window_outside_the_intensity_range_gives_zeros(window: tuple[float, float], method: str) -> None:
    pixels = np.random.default_rng(0).uniform(0, 50, (32, 16)).astype(np.float32)
    slices = prepare(image(pixels), task(normalisation={"method": method, "window": window})).slices
    np.testing.assert_array_equal(slices, 0)


def test_zscore_keeps_contrast_under_a_large_offset() -> None:
    """Unsigned 16-bit scans may have a high offset: moments must not lose precision in float32."""
    rng = np.random.default_rng(1)
    pixels = (60_000 + rng.integers(0, 4, (64, 64))).astype(np.uint16)
    slices = prepare(image(pixels), task(size=(64, 64))).slices
    assert slices.mean(dtype=np.float64) == pytest.approx(0, abs=1e-4)
    assert slices.std(dtype=np.float64) == pytest.approx(1, abs=1e-4)


def test_intensities_are_normalised_before_resizing() -> None:
    pixels = np.random.default_rng(2).normal(100, 20, (64, 64)).astype(np.float32)
    small = prepare(image(pixels), task(size=(16, 16))).slices
    # Averaging 4x4 noise pixels leaves a quarter of the deviation; normalising afterwards would give 1.
    assert 0.1 < small.std() < 0.5


def test_resizing_is_linear_and_pixel_centred() -> None:
    ramp = np.tile(np.arange(64, dtype=np.float32), (64, 1))
    slices = prepare(image(ramp), task(size=(32, 32), normalisation={"method": "none"})).slices
    np.testing.assert_allclose(slices[0, 0, 10, 2:-2], 2 * np.arange(2, 30) + 0.5, atol=1e-4)
    large = prepare(image(ramp), task(size=(128, 128), normalisation={"method": "none"})).slices
    np.testing.assert_allclose(large[0, 0, 70, 4:-4], np.arange(4, 124) / 2 - 0.25, atol=1e-4)


def test_grey_image_saved_as_rgb_is_prepared_as_grey() -> None:
    grey = np.random.default_rng(3).integers(0, 255, (32, 16), dtype=np.uint8)
    for colour in ("refuse", "luminance", "replicate"):
        same = prepare(image(np.dstack([grey] * 3)), task(colour=colour)).slices
        np.testing.assert_array_equal(same, prepare(image(grey), task()).slices)


def test_luminance_matches_the_hand_computed_value() -> None:
    rgb = np.zeros((32, 16, 3), np.uint8)
    rgb[0, 0] = (100, 50, 200)
    slices = prepare(image(rgb), task(colour="luminance", normalisation={"method": "none"})).slices
    assert slices[0, 0, 0, 0] == pytest.approx(0.299 * 100 + 0.587 * 50 + 0.114 * 200, rel=1e-6)
    assert slices.shape == (1, 1, 32, 16)


def test_replicate_gives_three_equal_channels() -> None:
    grey = np.random.default_rng(4).integers(0, 255, (32, 16), dtype=np.uint8)
    slices = prepare(image(grey), task(channels=3, colour="replicate")).slices
    for channel in range(3):
        np.testing.assert_array_equal(slices[:, channel], prepare(image(grey), task()).slices[:, 0])


@pytest.mark.parametrize(("found", "expected"), [(3, 1), (1, 3)])
@pytest.mark.parametrize("colour", ["refuse", "luminance", "replicate"])
def test_channel_mismatch_without_a_colour_rule_is_rejected(found: int, expected: int, colour: str) -> None:
    if (found, colour) in ((3, "luminance"), (1, "replicate")):
        return
    pixels = np.random.default_rng(5).integers(0, 255, (32, 16, found), dtype=np.uint8)
    with pytest.raises(ScanMismatch, match=rf"\({expected} channels\).*\({found} channels\)"):
        prepare(image(pixels), task(channels=expected, colour=colour))


def test_colour_image_is_normalised_over_all_channels() -> None:
    rgb = np.random.default_rng(6).integers(0, 255, (32, 16, 3), dtype=np.uint8)
    slices = prepare(image(rgb), task(channels=3)).slices
    expected = (rgb - rgb.mean()) / rgb.std()
    np.testing.assert_allclose(slices[0], np.moveaxis(expected, -1, 0), atol=1e-5)


@pytest.mark.parametrize("neighbours", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_neighbour_slices_repeat_the_first_and_last_slice(neighbours: int, depth: int) -> None:
    voxels = np.random.default_rng(7).normal(0, 1, (16, 32, depth)).astype(np.float32)
    single = prepare(volume(voxels), task(normalisation={"method": "none"})).slices
    stacked = prepare(volume(voxels), task(neighbours=neighbours, normalisation={"method": "none"})).slices
    assert stacked.shape == (depth, 2 * neighbours + 1, 32, 16)
    for s in range(depth):
        for channel, step in enumerate(range(-neighbours, neighbours + 1)):
            np.testing.assert_array_equal(stacked[s, channel], single[min(max(s + step, 0), depth - 1), 0])


def test_neighbour_channels_of_colour_volumes_are_ordered_by_slice() -> None:
    rgb = np.random.default_rng(8).integers(0, 255, (16, 32, 3, 3), dtype=np.uint8)
    scan = Scan(rgb, np.diag([-1.0, -1.0, 1.0, 1.0]), "nifti")
    slices = prepare(scan, task(channels=3, neighbours=1, normalisation={"method": "none"})).slices
    assert slices.shape == (3, 9, 32, 16)
    for channel in range(9):
        expected = rgb[:, :, channel // 3, channel % 3].T
        np.testing.assert_array_equal(slices[1, channel], expected)


@pytest.mark.parametrize("scope", ["image", "volume"])
@pytest.mark.parametrize("method", ["zscore", "minmax"])
def test_intensities_of_the_middle_are_those_of_a_scan_of_the_middle_alone(scope: str, method: str) -> None:
    voxels = np.random.default_rng(5).normal(100, 20, (64, 32, 3)).astype(np.float32)
    voxels[:10] += 400
    own = {"scope": scope, "method": method, "percentiles": (1.0, 99.0)}
    whole = prepare(volume(voxels), task((32, 64), normalisation={**own, "middle": 0.5})).slices
    alone = prepare(volume(voxels[16:48, 8:24]), task((16, 32), normalisation=own)).slices
    np.testing.assert_allclose(whole[:, :, 8:24, 16:48], alone, atol=1e-5)


def test_middle_is_written_only_where_it_is_said() -> None:
    assert "middle" not in Normalisation().model_dump()
    assert Normalisation(middle=0.5).model_dump()["middle"] == 0.5
