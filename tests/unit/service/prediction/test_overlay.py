"""Overlays, looked at pixel by pixel."""

from __future__ import annotations

import io

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from service.prediction.overlay import COLOURS, Panel, choose_slices, colour_of, overlay


def square(side: int = 64, value: int = 1) -> NDArray[np.uint8]:
    classes = np.zeros((side, side), np.uint8)
    classes[side // 4 : side // 2, side // 4 : 3 * side // 4] = value
    return classes


def draw(panels: list[Panel], legend: list[tuple[int, str]]) -> NDArray[np.uint8]:
    picture = Image.open(io.BytesIO(overlay(panels, legend, "title", "footer")))
    assert picture.mode == "RGB"
    return np.asarray(picture)


def share(pixels: NDArray[np.uint8], colour: tuple[int, int, int]) -> int:
    return int((pixels == np.array(colour, np.uint8)).all(axis=-1).sum())


def test_contour_and_legend_have_only_the_colour_of_the_class() -> None:
    grey = np.full((64, 64, 3), 127, np.uint8)
    pixels = draw([Panel(grey, square(value=2))], [(2, "tumour")])
    swatch = 15 * 15
    assert share(pixels, colour_of(2)) > swatch
    assert share(pixels, colour_of(1)) == 0
    without = draw([Panel(grey, np.zeros((64, 64), np.uint8))], [(2, "tumour")])
    assert share(without, colour_of(2)) == swatch


def test_fill_blends_inside_and_keeps_grey_outside() -> None:
    # One pixel is ten in the picture; the image's left upper corner lies at (12, 38).
    grey = np.full((64, 64, 3), 127, np.uint8)
    pixels = draw([Panel(grey, square())], [])
    inside, outside = pixels[38 + 240, 12 + 320], pixels[38 + 600, 12 + 600]
    np.testing.assert_array_equal(outside, [127, 127, 127])
    expected = 0.65 * 127 + 0.35 * np.array(colour_of(1))
    np.testing.assert_allclose(inside, expected, atol=1)


def test_fill_is_35_percent_of_each_class_colour_at_every_value() -> None:
    # As many pixels as the picture has, so that none is resized; nine classes, of which two repeat colours.
    values = np.arange(640 * 640, dtype=np.uint32).reshape(640, 640)
    image = np.stack([values % 256, values // 7 % 256, values // 640 % 256], axis=-1).astype(np.uint8)
    classes = np.repeat(np.arange(10, dtype=np.uint8), 64)[np.newaxis].repeat(640, axis=0)
    drawn = draw([Panel(image, classes)], [])[38:678, 12:652]
    for index in range(1, 10):
        # Without the contour, which is two pixels wide.
        part = slice(2, -2), slice(64 * index + 2, 64 * index + 62)
        expected = 0.65 * image[part] + 0.35 * np.array(colour_of(index))
        np.testing.assert_array_equal(drawn[part], expected.astype(np.uint8))
    np.testing.assert_array_equal(drawn[:, :64], image[:, :64])


def test_contour_is_drawn_inside_the_mask() -> None:
    grey = np.full((64, 64, 3), 127, np.uint8)
    pixels = draw([Panel(grey, square())], [])
    marked = (pixels == np.array(colour_of(1), np.uint8)).all(axis=-1)
    rows, columns = np.nonzero(marked)
    assert (rows.min() - 38, rows.max() - 38) == (160, 319)
    assert (columns.min() - 12, columns.max() - 12) == (160, 479)


def test_overlay_keeps_the_colours_of_the_image() -> None:
    red = np.zeros((32, 32, 3), np.uint8)
    red[..., 0] = 255
    pixels = draw([Panel(red, np.zeros((32, 32), np.uint8))], [])
    assert share(pixels, (255, 0, 0)) == 640 * 640


def test_overlay_keeps_the_aspect_ratio_of_pixels() -> None:
    tall = draw([Panel(np.zeros((32, 32, 3), np.uint8), square(32), aspect=3.0)], [])
    marked = (tall == np.array(colour_of(1), np.uint8)).all(axis=-1)
    rows, columns = np.nonzero(marked)
    # The square is 8 high and 16 wide, and a pixel three times as high as wide.
    assert (np.ptp(rows) + 1) / (np.ptp(columns) + 1) == pytest.approx(24 / 16, rel=0.03)


def test_montage_shows_every_panel() -> None:
    panels = [Panel(np.zeros((16, 16, 3), np.uint8), square(16, value=i + 1), str(i)) for i in range(7)]
    pixels = draw(panels, [])
    assert all(share(pixels, colour) > 0 for colour in COLOURS)


def test_choose_slices_spreads_over_the_mask() -> None:
    assert choose_slices([0, 5, 9, 0, 7, 1], count=4) == [1, 2, 4, 5]
    assert choose_slices([0, 5, 0], count=3) == [1]
    assert choose_slices([0, *[900] * 50, *[1] * 40, 0], count=3) == [16, 46, 76]


def test_choose_slices_of_an_empty_mask_spreads_evenly() -> None:
    assert choose_slices([0] * 10, count=5) == [1, 3, 5, 7, 9]
    assert choose_slices([0], count=9) == [0]
