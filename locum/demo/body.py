"""Draw the tissues of an abdomen that no patient has: skin, fat, muscles, ribs, spine, organs and a lesion.

Tissues are drawn on a grid twice as fine as the scan's, in world coordinates (RAS+, mm), and averaged down:
a voxel at an edge has a share of both tissues, as in a scan (partial volume). Every patient has a smooth
deformation of the same atlas, so no outline is an ellipse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Field = NDArray[np.float32]
Inside = NDArray[np.bool_]
Paint = Callable[[Inside, "Tissue"], None]
Near = Callable[[float, float], float]
Point = tuple[float, float, float]

# Voxels of a scan and their size in mm: x to the patient's right, y to the front, z to the head.
SHAPE = (192, 160, 8)
VOXEL_MM = (1.85, 1.85, 7.0)
# Fine voxels per voxel, along each axis.
_FINER = 2
# Values of the mask.
LIVER, LESION = 1, 2


class Tissue(IntEnum):
    """What a fine voxel is made of."""

    AIR = 0
    SKIN = 1
    FAT = 2
    MUSCLE = 3
    BONE = 4
    MARROW = 5
    CANAL = 6
    LIVER = 7
    LESION = 8
    VESSEL = 9
    SPLEEN = 10
    CORTEX = 11
    MEDULLA = 12
    STOMACH = 13
    CONTENT = 14
    BOWEL = 15
    PANCREAS = 16
    RIM = 17


# Brightness within [0, 1] before the scanner, and how strongly texture shows, by tissue.
_LOOK: dict[Tissue, tuple[float, float]] = {
    Tissue.AIR: (0.02, 0.0),
    Tissue.SKIN: (0.46, 0.02),
    Tissue.FAT: (0.24, 0.018),
    Tissue.MUSCLE: (0.47, 0.022),
    Tissue.BONE: (0.93, 0.04),
    Tissue.MARROW: (0.68, 0.06),
    Tissue.CANAL: (0.40, 0.01),
    Tissue.LIVER: (0.58, 0.014),
    Tissue.LESION: (0.40, 0.022),
    Tissue.VESSEL: (0.76, 0.01),
    Tissue.SPLEEN: (0.64, 0.014),
    Tissue.CORTEX: (0.74, 0.015),
    Tissue.MEDULLA: (0.58, 0.02),
    Tissue.STOMACH: (0.52, 0.02),
    Tissue.CONTENT: (0.36, 0.03),
    Tissue.BOWEL: (0.50, 0.05),
    Tissue.PANCREAS: (0.53, 0.03),
    Tissue.RIM: (0.66, 0.015),
}


def draw_body(draw: np.random.Generator) -> tuple[Field, NDArray[np.uint8]]:
    """Draw a patient: brightness [X, Y, Z] within [0, 1], and the mask [X, Y, Z] of liver and lesion.

    A voxel of the mask has the label that fills at least half of it.
    """
    fine = tuple(n * _FINER for n in SHAPE)
    tissue, liver, lesion = _tissues(draw, fine)
    looks = np.array([_LOOK[kind] for kind in Tissue], np.float32)
    grain = ndimage.gaussian_filter(draw.normal(size=fine).astype(np.float32), (2.2, 2.2, 0.5))
    grain = grain / grain.std() + 0.8 * smooth(draw, fine, (14, 14, 4))
    bright = _average(looks[tissue, 0] + looks[tissue, 1] * grain)
    in_liver, in_lesion = _average(liver < 0), _average(lesion < 0)
    mask = np.where(in_lesion >= 0.5, LESION, np.where(in_liver >= 0.5, LIVER, 0))
    return np.clip(bright, 0, 1), mask.astype(np.uint8)


def _average(fine: NDArray[np.generic]) -> Field:
    """Average the fine voxels of each voxel."""
    x, y, z = SHAPE
    blocks = fine.reshape(x, _FINER, y, _FINER, z, _FINER)
    averaged: Field = blocks.mean(axis=(1, 3, 5), dtype=np.float32)
    return averaged


def smooth(draw: np.random.Generator, shape: tuple[int, ...], knots: tuple[int, int, int]) -> Field:
    """A smooth random field of unit deviation: about `knots` random values per axis, cubic between them."""
    field: Field = draw.normal(size=[n + 3 for n in knots]).astype(np.float32)
    for length in shape:
        # One axis at a time, each to the end: the cubic of three axes is the product of three.
        line = np.eye(field.shape[0], dtype=np.float32)
        weights = ndimage.zoom(line, (length / len(line), 1), order=3)
        field = np.moveaxis(np.tensordot(weights, field, axes=1), 0, -1)
    return np.ascontiguousarray((field - field.mean()) / field.std())


@dataclass(frozen=True)
class _Space:
    """World coordinates of the fine voxels, mm, bent by the patient's own smooth deformation."""

    x: Field
    y: Field
    z: Field

    def ellipsoid(
        self, centre: tuple[float, float, float], radii: tuple[float, float, float], turn: float = 0.0
    ) -> Field:
        """The signed distance to a surface, about mm, negative inside; `turn` is about z, in degrees."""
        cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
        x, y, z = self.x - centre[0], self.y - centre[1], self.z - centre[2]
        across, along = (cos * x + sin * y) / radii[0], (cos * y - sin * x) / radii[1]
        scaled: Field = np.sqrt(across**2 + along**2 + (z / radii[2]) ** 2)
        return (scaled - 1) * min(radii)

    def tube(
        self, start: tuple[float, float, float], end: tuple[float, float, float], radii: tuple[float, float]
    ) -> Field:
        """The signed distance to a tube that narrows from its start to its end, mm."""
        line = [b - a for a, b in zip(start, end, strict=True)]
        offset = (self.x - start[0], self.y - start[1], self.z - start[2])
        along = np.clip(
            sum(o * step for o, step in zip(offset, line, strict=True)) / sum(step * step for step in line),
            0,
            1,
        )
        away = np.sqrt(sum((o - along * step) ** 2 for o, step in zip(offset, line, strict=True)))
        distance: Field = (away - (radii[0] + along * (radii[1] - radii[0]))).astype(np.float32)
        return distance


def _union(first: Field, second: Field, soft_mm: float) -> Field:
    """The signed distance to two shapes that flow into each other over `soft_mm`."""
    mixed = np.clip(0.5 + 0.5 * (second - first) / soft_mm, 0, 1)
    distance: Field = second + mixed * (first - second) - soft_mm * mixed * (1 - mixed)
    return distance


def _space(draw: np.random.Generator, fine: tuple[int, ...]) -> _Space:
    """The patient's coordinates: size, then slow bends of the trunk, then small ones of outlines."""
    axes = [
        (np.arange(n, dtype=np.float32) - (n - 1) / 2) * (mm / _FINER)
        for n, mm in zip(fine, VOXEL_MM, strict=True)
    ]
    x, y, z = np.meshgrid(*axes, indexing="ij")
    width, depth = map(float, draw.uniform(0.93, 1.05, 2))
    bent = []
    for coordinate, scale in ((x, width), (y, depth)):
        slow, quick = smooth(draw, fine, (3, 3, 2)), smooth(draw, fine, (13, 13, 3))
        bent.append((coordinate / scale + 3.2 * slow + 1.2 * quick).astype(np.float32))
    return _Space(bent[0], bent[1], (z + float(draw.uniform(-8, 8))).astype(np.float32))


def _tissues(draw: np.random.Generator, fine: tuple[int, ...]) -> tuple[NDArray[np.uint8], Field, Field]:
    """Draw what each fine voxel is made of, from the skin inwards: later organs cover earlier ones.

    Returns the tissues, and the signed distances to liver and lesion in mm.
    """
    space = _space(draw, fine)
    tissue = np.zeros(fine, np.uint8)

    def near(value: float, spread: float) -> float:
        return float(value + draw.uniform(-spread, spread))

    def paint(where: Inside, kind: Tissue) -> None:
        tissue[where] = kind

    # The trunk: an ellipse that is flat at the back.
    back = np.where(space.y < 0, 1.12, 1.0).astype(np.float32)
    trunk = replace(space, y=space.y * back).ellipsoid((0, 0, 0), (158, 112, 900))
    # More fat at the flanks than in front.
    rind = near(13, 5) + 5 * np.abs(np.sin(np.arctan2(space.y, space.x) + 0.4))
    paint(trunk < 0, Tissue.SKIN)
    paint(trunk < -2.5, Tissue.FAT)
    wall: Field = (trunk + rind).astype(np.float32)
    paint(wall < 0, Tissue.MUSCLE)
    cavity = wall + 9 + 4 * (space.y < -35)
    paint(cavity < 0, Tissue.FAT)
    _paint_back(space, paint, near)
    _paint_ribs(space, wall, paint, near)
    _paint_bowel(space, cavity, paint, near, draw)
    _paint_left(space, cavity, paint, near)
    _paint_kidneys(space, cavity, paint, near)
    liver = _paint_liver(space, cavity, paint, near)
    _paint_vessels(space, liver, paint, near)
    lesion = _paint_lesion(space, liver, paint, near, draw, fine)
    return tissue, liver, lesion


def _paint_back(space: _Space, paint: Paint, near: Near) -> None:
    """Paint the spine with its muscles, in front of it the great vessels."""
    y = near(-58, 3)
    for side in (-1, 1):
        paint(space.ellipsoid((side * 36, y - 22, 0), (27, 19, 900), side * 14) < 0, Tissue.MUSCLE)
        paint(space.ellipsoid((side * 33, y + 12, -60), (15, 17, 75)) < 0, Tissue.MUSCLE)
        # A cleft of fat between the muscles.
        paint(space.ellipsoid((side * 40, y - 20, 0), (20, 1.4, 900), side * 24) < 0, Tissue.FAT)
        paint(space.tube((side * 12, y - 8, 0), (side * 40, y - 12, 0), (6, 3)) < 0, Tissue.BONE)
    vertebra = space.ellipsoid((0, y + 12, 0), (24, 19, 900))
    paint(vertebra < 0, Tissue.BONE)
    paint(vertebra < -2.2, Tissue.MARROW)
    arch = space.ellipsoid((0, y - 13, 0), (17, 14, 900))
    spinous = space.ellipsoid((0, y - 30, 0), (4.5, 17, 900))
    paint((arch < 0) | (spinous < 0), Tissue.BONE)
    paint((arch < -3) | (spinous < -2), Tissue.MARROW)
    paint(space.ellipsoid((0, y - 10, 0), (11, 8.5, 900)) < 0, Tissue.CANAL)
    paint(space.ellipsoid((0, y - 10, 0), (5.5, 4.2, 900)) < 0, Tissue.MUSCLE)
    for x, radius in ((-13, near(10.5, 1)), (17, near(12.5, 1.5))):
        vessel = space.ellipsoid((x, y + 44, 0), (radius, radius * (1.0 if x < 0 else 0.75), 900))
        paint(vessel < 1.6, Tissue.MUSCLE)
        paint(vessel < 0, Tissue.VESSEL)


def _paint_ribs(space: _Space, wall: Field, paint: Paint, near: Near) -> None:
    """Paint ribs, cut obliquely where they cross the slices in the wall."""
    angle = np.rad2deg(np.arctan2(space.y, np.abs(space.x)))
    for middle in (-52.0, -24.0, 2.0, 26.0, 47.0):
        # They descend to the front.
        away = (angle - near(middle, 4) - 0.32 * space.z) * 2.1
        rib = np.sqrt((away / 11) ** 2 + ((wall + 5) / 4.2) ** 2) - 1
        paint(rib < 0, Tissue.BONE)
        paint(rib < -0.42, Tissue.MARROW)


def _paint_bowel(space: _Space, cavity: Field, paint: Paint, near: Near, draw: np.random.Generator) -> None:
    """Paint loops of bowel in front and on the left, and the pancreas in the middle."""
    for _ in range(11):
        x, y, z = map(float, draw.uniform((-92, 2, -60), (40, 78, 5)))
        along, across = near(20.5, 5.5), near(12.5, 2.5)
        loop = space.ellipsoid((x, y, z), (along, across, 26), near(0, 70))
        paint((loop < 0) & (cavity < -4), Tissue.BOWEL)
        paint((loop < -2.5) & (cavity < -4), Tissue.CONTENT if draw.random() < 0.6 else Tissue.PANCREAS)
        if draw.random() < 0.35:
            paint((loop < -3) & (cavity < -4) & (space.y > y + across * 0.3), Tissue.AIR)
    head = space.ellipsoid((22, 18, -6), (17, 14, 22))
    tail = space.tube((18, 18, -4), (-62, -2, 10), (11, 8))
    paint(_union(head, tail, 8) < 0, Tissue.PANCREAS)
    paint(space.tube((16, 9, -6), (-64, -8, 8), (4, 3)) < 0, Tissue.VESSEL)


def _paint_left(space: _Space, cavity: Field, paint: Paint, near: Near) -> None:
    """Paint the spleen, and the stomach with its wall, what it holds and the air above that."""
    spleen = space.ellipsoid((-112, near(-30, 6), near(12, 6)), (30, 46, 46), 18)
    hilum = space.ellipsoid((-78, -22, 10), (24, 24, 40))
    paint((np.maximum(spleen, -hilum) < 0) & (cavity < -2), Tissue.SPLEEN)
    stomach = space.ellipsoid((near(-62, 5), near(40, 5), near(24, 6)), (42, 30, 44), near(-28, 8))
    stomach = np.maximum(stomach, cavity + 5)
    paint(stomach < 0, Tissue.STOMACH)
    paint(stomach < -4, Tissue.CONTENT)
    paint((stomach < -4) & (space.y > near(54, 4)), Tissue.AIR)


def _paint_kidneys(space: _Space, cavity: Field, paint: Paint, near: Near) -> None:
    """Paint two kidneys in their fat: cortex, pyramids of the medulla, and the sinus."""
    for side, z in ((-1, near(-18, 5)), (1, near(-26, 5))):
        centre = (side * near(68, 4), near(-44, 4), z)
        paint((space.ellipsoid(centre, (42, 46, 66)) < 0) & (cavity < -1), Tissue.FAT)
        kidney = space.ellipsoid(centre, (25, 31, 48), side * -24)
        inward = (centre[0] - side * 20, centre[1] + 8, z)
        sinus = space.ellipsoid(inward, (21, 11, 22), side * -24)
        paint(kidney < 0, Tissue.CORTEX)
        angle = np.arctan2(space.y - centre[1], space.x - centre[0])
        pyramids = (np.sin(7 * angle + 0.06 * space.z) > -0.25) & (kidney < -6.5)
        paint(pyramids, Tissue.MEDULLA)
        paint((sinus < 0) & (kidney < 6), Tissue.FAT)
        paint((sinus < -7) & (kidney < 6), Tissue.CONTENT)


def _paint_liver(space: _Space, cavity: Field, paint: Paint, near: Near) -> Field:
    """Paint the liver under the right wall, and the gall bladder below it; return its signed distance."""
    right = space.ellipsoid((near(76, 4), near(6, 5), near(22, 6)), (74, near(82, 5), 92), -12)
    left = space.ellipsoid((near(4, 8), near(58, 4), near(24, 6)), (62, 27, 52), -10)
    liver = _union(right, left, 22)
    kidney = space.ellipsoid((70, -52, -26), (34, 40, 62), -24)
    hilum = space.ellipsoid((22, 12, -16), (34, 26, 40), 20)
    liver = np.maximum(np.maximum(liver, cavity + 2.5), np.maximum(-kidney, -hilum))
    spine = space.ellipsoid((10, -46, 0), (47, 45, 900))
    liver = np.maximum(liver, -spine)
    paint(liver < 0, Tissue.LIVER)
    bladder = space.ellipsoid((near(44, 4), near(38, 4), near(-22, 4)), (13, 20, 22), 22)
    paint(bladder < 2, Tissue.STOMACH)
    paint(bladder < 0, Tissue.CONTENT)
    kept: Field = np.maximum(liver, 2 - bladder)
    return kept


def _paint_vessels(space: _Space, liver: Field, paint: Paint, near: Near) -> None:
    """Paint the portal vein from the hilum into the liver, and the hepatic veins to the back."""
    hilum: Point = (32, 14, 2)
    cava: Point = (22, -16, 34)
    branches = [
        (hilum, (74, 4, 6), (7, 5)),
        ((74, 4, 6), (near(116, 8), near(34, 8), 2), (4.4, 1.6)),
        ((74, 4, 6), (near(112, 8), near(-34, 8), 8), (4.4, 1.6)),
        ((92, 16, 5), (near(100, 6), near(62, 8), 14), (3, 1.2)),
        ((88, -10, 7), (near(86, 6), near(-48, 6), -4), (3, 1.2)),
        (hilum, (14, near(58, 6), 16), (5.5, 2.2)),
        (cava, (near(96, 8), near(-8, 6), 26), (5.5, 1.6)),
        (cava, (near(66, 6), near(50, 8), 28), (5, 1.6)),
        (cava, (near(124, 6), near(6, 6), -16), (5, 1.2)),
    ]
    for start, end, radii in branches:
        paint((space.tube(start, end, radii) < 0) & (liver < -2), Tissue.VESSEL)


def _paint_lesion(
    space: _Space, liver: Field, paint: Paint, near: Near, draw: np.random.Generator, fine: tuple[int, ...]
) -> Field:
    """Paint a lesion well inside the liver: dark, lobed, with a brighter rim; return its signed distance."""
    # Deep enough for it, near the middle slices, and in the right lobe.
    deep = np.argwhere((liver < -22) & (np.abs(space.z) < 16) & (space.x > 40))
    x, y, z = (float(axis[tuple(deep[draw.integers(len(deep))])]) for axis in (space.x, space.y, space.z))
    radius = near(20, 4)
    lesion = space.ellipsoid((x, y, z), (radius, radius * near(0.92, 0.17), radius), near(45, 45))
    lesion = np.maximum(lesion + 1.8 * smooth(draw, fine, (18, 18, 4)), liver + 3)
    paint(lesion < 0, Tissue.RIM)
    paint(lesion < -2, Tissue.LESION)
    paint(lesion < -radius * 0.62, Tissue.CONTENT)
    return lesion
