"""Masks: conversion to class indices and slices, and back from probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from model_store.errors import MaskMismatch, TaskError
from model_store.preprocessing import (
    class_map,
    display_slices,
    geometry_of,
    label_values,
    prepare,
    prepare_mask,
    restore,
    to_slices,
)
from model_store.scan import Scan
from model_store.task import Normalisation, Task

FUNDUS = Task(
    name="fundus", labels={"disc": (1, 2), "cup": (2,)}, size=(32, 16), channels=3, colour="replicate"
)
BINARY = Task(name="b", labels={"a": (255,)}, size=(32, 16))
SPREAD = Task(name="s", labels={"x": (7,), "y": (40, 300), "xy": (7, 40)}, background=(0, 9), size=(32, 16))


def image(pixels: NDArray[Any]) -> Scan:
    return Scan(pixels if pixels.ndim == 3 else pixels[..., None], None, "png")


def test_class_map_turns_nested_labels_into_exclusive_classes() -> None:
    drawn = np.array([[0, 1], [2, 1]], np.uint8).repeat(8, 0).repeat(8, 1)
    np.testing.assert_array_equal(class_map(image(drawn), FUNDUS), drawn)
    # 7 has labels {x, xy}, 40 has {y, xy}, 300 has {y}; 9 is a second background.
    values = np.array([[0, 9, 7], [40, 300, 9]], np.uint16)
    expected = [[0, 0, 1], [2, 3, 0]]
    np.testing.assert_array_equal(class_map(image(values), SPREAD), expected)


@pytest.mark.parametrize("dtype", ["u1", "u2", "i2", "i4", "i8", "u8", "f4", "f8"])
def test_class_map_accepts_masks_of_any_dtype(dtype: str) -> None:
    drawn = (np.arange(96).reshape(12, 8) % 3).astype(dtype)
    np.testing.assert_array_equal(class_map(image(drawn), FUNDUS), drawn)


def test_class_map_rounds_values_close_to_whole_numbers() -> None:
    drawn = np.array([[0.0, 1.00002], [1.99997, 0]], np.float32)
    np.testing.assert_array_equal(class_map(image(drawn), FUNDUS), [[0, 1], [2, 0]])


@pytest.mark.parametrize(
    ("values", "named"), [([0, 3], "3"), ([0, 70000], "70000"), ([-1, 1], "-1"), ([5, 4, 0], "4, 5")]
)
def test_class_map_with_values_outside_the_task_names_them(values: list[int], named: str) -> None:
    with pytest.raises(TaskError, match=rf"does not name: {named};"):
        class_map(image(np.array([values], np.int64)), FUNDUS)


def test_class_map_with_many_outside_values_counts_them() -> None:
    with pytest.raises(TaskError, match=r"3, 4, 5, 6, 7, 8, 9, 10, … \(97 in all\)"):
        class_map(image(np.arange(100).reshape(10, 10)), FUNDUS)


def test_class_map_rejects_interpolated_and_coloured_masks() -> None:
    with pytest.raises(TaskError, match=r"not whole numbers \(0.5\)"):
        class_map(image(np.array([[0, 0.5, 1]], np.float32)), FUNDUS)
    colours = np.zeros((8, 8, 3), np.uint8)
    colours[0, 0, 0] = 1
    with pytest.raises(MaskMismatch, match="colours"):
        class_map(image(colours), FUNDUS)
    np.testing.assert_array_equal(class_map(image(np.ones((8, 8, 3), np.uint8)), FUNDUS), 1)


def test_label_values_lists_mask_values_and_rejects_pictures() -> None:
    drawn = np.zeros((12, 8), np.float32)
    drawn[3, 4], drawn[5, 5] = 300.0004, 7
    assert label_values(image(drawn)) == [0, 7, 300]
    wide = np.arange(16 * 16, dtype=np.uint16).reshape(16, 16)
    assert len(label_values(image(wide))) == 256
    wide[0, 0] = 999
    wide = np.vstack([wide, np.zeros_like(wide)])
    with pytest.raises(MaskMismatch, match="a picture with 257 values"):
        label_values(image(wide))
    with pytest.raises(TaskError, match="not whole numbers"):
        label_values(image(drawn + np.float32(0.5)))


def test_prepare_mask_resizes_by_nearest_neighbour_at_pixel_centres() -> None:
    drawn = (np.random.default_rng(0).integers(0, 2, (64, 48)) * 255).astype(np.uint8)
    geometry = geometry_of(image(drawn), BINARY)
    rows = np.floor((np.arange(32) + 0.5) * 64 / 32).astype(int)
    columns = np.floor((np.arange(16) + 0.5) * 48 / 16).astype(int)
    np.testing.assert_array_equal(
        prepare_mask(image(drawn), BINARY, geometry)[0], drawn[np.ix_(rows, columns)] // 255
    )


def test_prepare_mask_rejects_a_mask_on_another_grid_than_its_scan() -> None:
    affine = np.diag([2.0, 2.0, 2.0, 1.0])
    scan = Scan(np.zeros((16, 18, 20, 1), np.int16), affine, "nifti")
    geometry = geometry_of(scan, BINARY)
    with pytest.raises(MaskMismatch, match="16 x 18 x 19"):
        prepare_mask(Scan(np.zeros((16, 18, 19, 1), np.uint8), affine, "nifti"), BINARY, geometry)
    moved, rounded = affine.copy(), affine.copy()
    moved[0, 3] += 1.5
    rounded[0, 3] += 1e-4
    voxels = np.zeros((16, 18, 20, 1), np.uint8)
    with pytest.raises(MaskMismatch, match=r"1\.5 mm"):
        prepare_mask(Scan(voxels, moved, "nifti"), BINARY, geometry)
    assert prepare_mask(Scan(voxels, rounded, "nifti"), BINARY, geometry).shape == (20, 32, 16)


def naive(probabilities: NDArray[np.float32], shape: tuple[int, int]) -> NDArray[np.int64]:
    """Definition: upsample every class, then take np.argmax."""
    planes = [
        np.asarray(Image.fromarray(p).resize(shape[::-1], Image.Resampling.BILINEAR)) for p in probabilities
    ]
    return np.asarray(np.stack(planes).argmax(0))


@given(
    classes=st.integers(2, 5),
    shape=st.tuples(st.integers(8, 70), st.integers(8, 70)),
    levels=st.sampled_from([2, 3, 0]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_restore_equals_argmax_after_upsampling_including_ties(
    classes: int, shape: tuple[int, int], levels: int, seed: int
) -> None:
    """`levels` limits the distinct probabilities, so that exact ties are frequent."""
    rng = np.random.default_rng(seed)
    this = Task(name="t", labels={str(i): (i,) for i in range(1, classes)}, size=(32, 16))
    raw = rng.integers(0, levels, (1, classes, 32, 16)) + 1.0 if levels else rng.random((1, classes, 32, 16))
    probabilities = (raw / raw.sum(axis=1, keepdims=True)).astype(np.float32)
    geometry = geometry_of(image(np.zeros(shape, np.uint8)), this)
    np.testing.assert_array_equal(restore(probabilities, geometry), naive(probabilities[0], shape))


def test_restore_of_equal_probabilities_gives_background() -> None:
    geometry = geometry_of(image(np.zeros((50, 40), np.uint8)), BINARY)
    assert not restore(np.full((1, 2, 32, 16), 0.5, np.float32), geometry).any()


def test_restore_rejects_probabilities_of_wrong_shape_or_value() -> None:
    geometry = geometry_of(image(np.zeros((50, 40), np.uint8)), BINARY)
    good = np.full((1, 2, 32, 16), 0.5, np.float32)
    for bad, reason in (
        (good[0], "expected"),
        (good[..., :8], "32, 16"),
        (np.concatenate([good, good]), "expected 1 slices, found 2"),
        (good[:0], "expected 1 slices, found 0"),
        (good * np.float32(np.nan), "finite"),
    ):
        with pytest.raises(ValueError, match=reason):
            restore(bad, geometry)


def test_display_slices_match_network_slices_at_native_resolution() -> None:
    rng = np.random.default_rng(1)
    affine = np.array([[0, 0, 2.0, 0], [-1.5, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 1]])
    voxels = rng.integers(0, 400, (17, 19, 21, 1)).astype(np.int16)
    scan = Scan(voxels, affine, "nifti")
    this = Task(
        name="d",
        labels={"a": (1,)},
        size=(16, 32),
        normalisation=Normalisation(window=(100, 300), method="none"),
    )
    shown = display_slices(scan, this)
    # Axis 1 runs to superior, axis 0 to posterior, axis 2 to the right.
    assert len(shown) == 19
    assert shown.geometry.spacing == pytest.approx((3, 1.5, 2))
    expected = voxels[:, 4, ::-1, 0].clip(100, 300)
    np.testing.assert_allclose(shown[4][..., 0], (expected - 100.0) * 255 / 200, atol=0.51)
    assert shown[4].shape == (17, 21, 3)
    assert shown[4].dtype == np.uint8
    labels = (voxels[..., 0] > 200).astype(np.uint8)
    np.testing.assert_array_equal(to_slices(labels, shown.geometry)[4], labels[:, 4, ::-1])
    assert len(shown[:3]) == 3
    with pytest.raises(IndexError):
        shown[19]


def test_display_slices_of_an_8_bit_image_are_unchanged() -> None:
    rgb = np.random.default_rng(2).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    np.testing.assert_array_equal(display_slices(image(rgb), FUNDUS)[0], rgb)
    prepared = prepare(image(rgb), FUNDUS)
    np.testing.assert_array_equal(to_slices(rgb[..., 0], prepared.geometry)[0], rgb[..., 0])
