"""Draw a mask over its scan as a PNG, for people.

Each class is a translucent fill with a solid contour in its own colour (Okabe and Ito's, distinguishable for
the colour-blind). A volume becomes a montage of slices spread over the mask, in their order.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

COLOURS: tuple[tuple[int, int, int], ...] = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (213, 94, 0),
    (204, 121, 167),
    (0, 114, 178),
)
MAX_PANELS = 9
_COLUMNS = 3
_SINGLE_SIDE = 640
_PANEL_SIDE = 300
_GAP = 6
_MARGIN = 12
# Compression of PNG. QUICK draws in less than half of the time, with a seventh more bytes.
USUAL, QUICK = 6, 1
_FILL = 0.35
_PAPER = (20, 20, 22)
_INK = (235, 235, 235)
_FAINT = (160, 160, 165)

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Panel:
    """One slice: its picture uint8 [H, W, 3], its classes uint8 [H, W], and a caption.

    `aspect` is a pixel's height over its width in the patient; `left` names the patient's side there.
    """

    picture: Pixels
    classes: Pixels
    caption: str = ""
    aspect: float = 1.0
    left: str = ""


def choose_slices(
    voxels_per_slice: Sequence[int] | NDArray[np.integer], count: int = MAX_PANELS
) -> list[int]:
    """Choose evenly spread slices of those with foreground (of all for an empty mask), in ascending order.

    Spread rather than the fullest, so that every part of the mask is seen: its ends, and each label.
    """
    counts = np.asarray(voxels_per_slice)
    shown = np.flatnonzero(counts) if counts.any() else np.arange(len(counts))
    wanted = min(count, len(shown))
    return [int(index) for index in shown[((np.arange(wanted) + 0.5) * len(shown) / wanted).astype(int)]]


def colour_of(index: int) -> tuple[int, int, int]:
    """Return the colour of class `index`, counted from 1; colours repeat after the seventh."""
    return COLOURS[(index - 1) % len(COLOURS)]


def overlay(
    panels: Sequence[Panel],
    legend: Sequence[tuple[int, str]],
    title: str,
    footer: str,
    compression: int = USUAL,
) -> bytes:
    """Draw the picture as a PNG.

    Args:
        panels: one for an image, several for a volume.
        legend: (class index, text) per line.
        title: first line.
        footer: last line.
        compression: of the PNG, 0 to 9.
    """
    side = _SINGLE_SIDE if len(panels) == 1 else _PANEL_SIDE
    drawn = [_draw(panel, side) for panel in panels]
    columns = min(_COLUMNS, len(drawn))
    width = max(picture.width for picture in drawn)
    height = max(picture.height for picture in drawn)
    rows = -(-len(drawn) // columns)
    font, small = ImageFont.load_default(16), ImageFont.load_default(13)
    grid_width = columns * width + (columns - 1) * _GAP
    texts = [(title, font), (footer, small), *(("■  " + text, font) for _, text in legend)]
    canvas_width = max(grid_width, *(int(used.getlength(text)) + 8 for text, used in texts)) + 2 * _MARGIN
    top = _MARGIN + 26
    bottom = top + rows * (height + _GAP)
    canvas = Image.new("RGB", (canvas_width, bottom + 24 * len(legend) + 30 + _MARGIN), _PAPER)
    pen = ImageDraw.Draw(canvas)
    pen.text((_MARGIN, _MARGIN), title, _INK, font)
    for number, (panel, picture) in enumerate(zip(panels, drawn, strict=True)):
        x = _MARGIN + (number % columns) * (width + _GAP)
        y = top + (number // columns) * (height + _GAP)
        canvas.paste(picture, (x, y))
        if panel.caption:
            pen.text((x + 6, y + 4), panel.caption, _INK, small, stroke_width=2, stroke_fill=(0, 0, 0))
        if panel.left:
            place = (x + 6, y + picture.height // 2)
            pen.text(place, panel.left, _INK, small, anchor="lm", stroke_width=2, stroke_fill=(0, 0, 0))
    y = bottom + 4
    for index, text in legend:
        pen.rectangle((_MARGIN, y + 2, _MARGIN + 14, y + 16), fill=colour_of(index))
        pen.text((_MARGIN + 24, y), text, _INK, font)
        y += 24
    pen.text((_MARGIN, y + 4), footer, _FAINT, small)
    stream = io.BytesIO()
    canvas.save(stream, "PNG", compress_level=compression)
    return stream.getvalue()


def _draw(panel: Panel, side: int) -> Image.Image:
    height, width = panel.classes.shape
    scale = side / max(height * panel.aspect, width)
    shape = (max(1, round(width * scale)), max(1, round(height * panel.aspect * scale)))
    picture = Image.fromarray(np.ascontiguousarray(panel.picture)).resize(shape, Image.Resampling.BICUBIC)
    pixels = np.asarray(picture).copy()
    classes = np.asarray(Image.fromarray(panel.classes).resize(shape, Image.Resampling.NEAREST))
    edge = _contour(classes)
    for index in (np.flatnonzero(np.bincount(classes.ravel())[1:]) + 1).tolist():
        colour, inside = colour_of(index), classes == index
        # By a table of the 256 values: in float64, each pixel's takes longer than its compression.
        filled = ((1 - _FILL) * np.arange(256)[:, np.newaxis] + _FILL * np.array(colour)).astype(np.uint8)
        for channel in range(3):
            plane = pixels[..., channel]
            plane[inside] = filled[plane[inside], channel]
        pixels[edge & inside] = colour
    return Image.fromarray(pixels)


def _contour(classes: Pixels) -> NDArray[np.bool_]:
    """[H, W]: foreground within two pixels of another class or of the border of the picture."""
    height, width = classes.shape
    padded = np.pad(classes, 2)
    edge = np.zeros(classes.shape, dtype=bool)
    for dy, dx in ((0, 1), (0, -1), (1, 0), (-1, 0), (0, 2), (0, -2), (2, 0), (-2, 0)):
        edge |= padded[2 + dy : 2 + dy + height, 2 + dx : 2 + dx + width] != classes
    return edge & (classes > 0)
