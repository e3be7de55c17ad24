"""Contours of a mask in one plane, and the mask of contours, in pixels: (column, row), centres at integers.

A contour runs along the pixel edges, `INSET` inside them. A program that tests the centres of pixels, and one
that rounds points to pixels and counts the outline in, both find the same pixels in it. A hole is joined with
the contour around it by a keyhole, a cut of no width; no two contours of a plane share a pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

INSET: Final = 0.01
# A point nearer than this to a row or column of centres is on it: planning systems round to 0.01 mm.
_ON_CENTRE = 0.02
# Where a keyhole meets a hole, from the corner of a pixel on its left: near no centre, and on no other edge.
_KEYHOLE = 0.25

Points = NDArray[np.float64]

# East, south, west, north as (column, row); the mask is on the right-hand side.
_STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))


def count_points(mask: NDArray[np.bool_]) -> int:
    """Count the points of the contours of a mask [rows, columns], without those of keyholes."""
    m = np.pad(mask, 1).view(np.uint8)
    corners = m[:-1, :-1] + m[:-1, 1:] + m[1:, :-1] + m[1:, 1:]
    pinched = (corners == 2) & (m[:-1, :-1] == m[1:, 1:])
    return int(np.count_nonzero(corners & 1) + 2 * np.count_nonzero(pinched))


def outlines(
    mask: NDArray[np.bool_], tolerance: float = 0.0, spacing: tuple[float, float] = (1.0, 1.0)
) -> list[Points]:
    """Outline a mask [rows, columns]: a closed contour [N, 2] for each part of pixels that share edges.

    With a `tolerance`, points are left out so that no part of the pixels' edges is farther from the contour;
    `spacing` is that of columns and rows, in the unit of the tolerance. A part that would then share pixels
    with another keeps all of its points.
    """
    from scipy import ndimage

    box = ndimage.find_objects(mask.astype(np.uint8))
    if not box:
        return []
    top, left = box[0][0].start, box[0][1].start
    padded = np.pad(mask[box[0]], 1)
    parts, count = ndimage.label(padded)
    rings: list[list[Points]] = [[] for _ in range(count)]
    for part, ring in _rings(padded, parts):
        rings[part - 1].append(ring)
    contours = [_joined(own, own) for own in rings]
    if tolerance > 0:
        thinned = [_joined([_simplified(ring, tolerance, spacing) for ring in own], own) for own in rings]
        contours = _apart(thinned, contours, padded.shape)
    offset = np.array([left - 1, top - 1])
    return [contour + offset for contour in contours]


def _apart(thinned: Sequence[Points], exact: Sequence[Points], shape: tuple[int, int]) -> list[Points]:
    """The thinned contours, but the exact ones of parts that would share pixels."""
    found = [*thinned]
    while True:
        covered = np.zeros(shape, np.int32)
        windows = []
        for contour in found:
            part = filled(contour, shape)
            rows, columns = part.inside.shape
            window = covered[part.top : part.top + rows, part.left : part.left + columns]
            whole = part.inside | part.on
            window += whole
            windows.append((window, whole))
        shared = [bool((window[whole] > 1).any()) for window, whole in windows]
        again = [place for place, both in enumerate(shared) if both and found[place] is not exact[place]]
        if not again:
            return found
        for place in again:
            found[place] = exact[place]


def _rings(padded: NDArray[np.bool_], parts: NDArray[Any]) -> list[tuple[int, Points]]:
    """The closed outlines with the part each belongs to: first of the part, clockwise, then of its holes.

    Where two pixels touch at a corner alone, an outline stays with its own pixel.
    """
    rows, columns = padded.shape
    here, above, before = padded[1:, 1:], padded[:-1, 1:], padded[1:, :-1]
    width = columns - 1
    # By direction, whether an edge leaves the corner at the upper left of pixel [row + 1, column + 1].
    edges = np.zeros((4, rows - 1, width), bool)
    edges[0] = here & ~above
    edges[1, :, :] = ~here & before
    edges[2, :, 1:] = (~here & above)[:, :-1]
    edges[3, 1:, :] = (here & ~before)[:-1, :]
    leaves = [plane.tobytes() for plane in edges]
    steps = (1, width, -1, -width)
    seen = bytearray(len(leaves[0]))
    found: list[tuple[int, Points]] = []
    for start in np.flatnonzero(edges[0]).tolist():
        if seen[start]:
            continue
        corner, way = start, 0
        points: list[tuple[float, float]] = []
        while True:
            if way == 0:
                seen[corner] = 1
            corner += steps[way]
            turned = (way + 1) % 4
            if not leaves[turned][corner]:
                turned = way if leaves[way][corner] else (way + 3) % 4
            if turned != way:
                row, column = divmod(corner, width)
                # Inwards from both edges: to the right-hand side of each.
                (x1, y1), (x2, y2) = _STEPS[(way + 1) % 4], _STEPS[(turned + 1) % 4]
                points.append((column + 0.5 + INSET * (x1 + x2), row + 0.5 + INSET * (y1 + y2)))
            way = turned
            if corner == start and way == 0:
                break
        row, column = divmod(start, width)
        found.append((int(parts[row + 1, column + 1]), np.array(points)))
    return found


def _area(ring: Points) -> float:
    """Positive where a ring is clockwise, as rows go down."""
    x, y = (ring - ring[0]).T
    return float(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def _simplified(ring: Points, tolerance: float, spacing: tuple[float, float]) -> Points:
    """The points of a ring that Douglas and Peucker's algorithm keeps; all where these are no area."""
    scaled = ring * spacing
    far = int(np.argmax(np.linalg.norm(scaled - scaled[0], axis=1)))
    closed = np.concatenate([scaled, scaled[:1]])
    kept = np.zeros(len(closed), bool)
    kept[[0, far, -1]] = True
    spans = [(0, far), (far, len(ring))]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        between, along = closed[first + 1 : last] - closed[first], closed[last] - closed[first]
        length = float(along @ along)
        share = np.clip(between @ along / length, 0, 1) if length else np.zeros(len(between))
        off = np.linalg.norm(between - share[:, None] * along, axis=1)
        worst = int(off.argmax())
        if off[worst] > tolerance:
            middle = first + 1 + worst
            kept[middle] = True
            spans += [(first, middle), (middle, last)]
    thinned: Points = ring[kept[:-1]]
    return thinned if len(thinned) > 2 and _area(thinned) * _area(ring) > 0 else ring


def _joined(rings: Sequence[Points], exact: Sequence[Points]) -> Points:
    """One contour of a part and its holes: each is reached from the left, over a horizontal keyhole.

    A hole is taken after all that begin further to the left: the first outline to its left is joined by then.
    Where a thinned hole is beyond the thinned outline, the `exact` rings are joined.
    """
    joined = rings[0]
    for hole in sorted(rings[1:], key=lambda ring: float(ring[:, 0].min())):
        ring = _from_the_left(hole)
        x, y = ring[0]
        one, other = joined, np.roll(joined, -1, axis=0)
        crosses = np.flatnonzero((one[:, 1] <= y) != (other[:, 1] <= y))
        (x1, y1), (x2, y2) = one[crosses].T, other[crosses].T
        at = x1 + (y - y1) / (y2 - y1) * (x2 - x1)
        left = at < x
        if not left.any():
            return _joined(exact, exact)
        nearest = int(np.where(left, at, -np.inf).argmax())
        gate, place = np.array([[at[nearest], y]]), int(crosses[nearest]) + 1
        joined = np.concatenate([joined[:place], gate, ring, ring[:1], gate, joined[place:]])
    return joined


def _from_the_left(ring: Points) -> Points:
    """The ring from a point on its left side."""
    start = int(ring[:, 0].argmin())
    for place in (start, (start - 1) % len(ring)):
        one, other = ring[place], ring[(place + 1) % len(ring)]
        if one[0] == other[0]:
            point = np.array([[one[0], one[1] + np.copysign(_KEYHOLE, other[1] - one[1])]])
            return np.concatenate([point, np.roll(ring, -place - 1, axis=0)])
    return np.roll(ring, -start, axis=0)


@dataclass(frozen=True)
class Filled:
    """The pixels of a contour: those with their centres inside it, and those with their centres on it.

    Both are [rows, columns] of the window that begins at `top`, `left`.
    """

    top: int
    left: int
    inside: NDArray[np.bool_]
    on: NDArray[np.bool_]


def crossings(points: Points) -> int:
    """How many rows the edges of a contour cross in all: what `filled` computes."""
    y = points[:, 1]
    return int(np.abs(y - np.roll(y, -1)).sum()) + len(points)


def window_of(points: Points, shape: tuple[int, int]) -> tuple[int, int, int, int]:
    """Top, left, height and width of the pixels of a plane [rows, columns] that a contour may have."""
    rows, columns = shape
    left, top = (max(int(side), 0) for side in np.ceil(points.min(axis=0) - _ON_CENTRE))
    right, bottom = np.floor(points.max(axis=0) + _ON_CENTRE).astype(int)
    return (
        top,
        left,
        max(min(int(bottom), rows - 1) - top + 1, 0),
        max(min(int(right), columns - 1) - left + 1, 0),
    )


def filled(points: Points, shape: tuple[int, int]) -> Filled:
    """Fill a closed contour [N, 2] on a plane [rows, columns], by parity (even-odd)."""
    top, left, height, width = window_of(points, shape)
    centres = np.rint(points)
    snapped = np.where(np.abs(points - centres) <= _ON_CENTRE, centres, points) - [left, top]
    (x1, y1), (x2, y2) = snapped.T, np.roll(snapped, -1, axis=0).T
    on = np.zeros((height, width), bool)

    def mark(rows: NDArray[Any], columns: NDArray[Any]) -> None:
        there = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        on[rows[there].astype(int), columns[there].astype(int)] = True

    # Each edge has the rows from its upper end, inclusive, to its lower end, exclusive.
    first, last = np.ceil(np.minimum(y1, y2)), np.ceil(np.maximum(y1, y2))
    first, last = np.clip(first, 0, height), np.clip(last, 0, height)
    edge, row = _spread(first, last)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (x2 - x1) / (y2 - y1)
    at = x1[edge] + (row - y1[edge]) * slope[edge]
    nearest = np.rint(at)
    exact = np.abs(at - nearest) < 1e-9
    at[exact] = nearest[exact]
    mark(row[exact], nearest[exact])
    flips = np.zeros((height, width + 1), np.uint8)
    np.add.at(flips, (row.astype(int), np.clip(np.ceil(at), 0, width).astype(int)), 1)
    inside = (np.cumsum(flips & 1, axis=1, dtype=np.uint16)[:, :width] & 1).astype(bool)
    corner = (snapped == np.rint(snapped)).all(axis=1)
    mark(snapped[corner, 1], snapped[corner, 0])
    flat = (y1 == y2) & (y1 == np.rint(y1))
    begin, end = np.ceil(np.minimum(x1, x2)[flat]), np.floor(np.maximum(x1, x2)[flat]) + 1
    edge, column = _spread(np.clip(begin, 0, width), np.clip(end, 0, width))
    mark(y1[flat][edge], column)
    return Filled(top, left, inside, on)


def _spread(first: NDArray[Any], last: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The whole numbers from each `first` to its `last`, exclusive, and to which pair each belongs."""
    counts = np.maximum(last - first, 0).astype(int)
    of = np.repeat(np.arange(len(counts)), counts)
    begin = np.cumsum(counts) - counts
    return of, first[of] + (np.arange(len(of)) - begin[of])
