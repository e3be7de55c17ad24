"""A synthetic patient's anatomy as a function of world coordinates (RAS+, mm), which any grid can sample.

The organ is on the patient's right: an ellipsoid with a notch on its inner side and a lobe in front, above
and outside, so no mirroring or rotation maps it onto itself. On the left is a decoy: the organ's mirror
image, darker than the tissue around it, whereas the organ is brighter. A mask that was mirrored by mistake
falls on the decoy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]

# Extent of the imaged box, mm: in plane (x, y) and along z.
FIELD_XY = 96.0
FIELD_Z = 48.0

_MIRROR_X = np.array([-1.0, 1.0, 1.0])


def _ellipsoid(points: Points, centre: tuple[float, ...], radii: tuple[float, ...]) -> Points:
    """Approximate the signed distance to the surface, mm, negative inside. It is exact on the surface."""
    scaled: Points = (points - np.array(centre)) / np.array(radii)
    distance: Points = (np.linalg.norm(scaled, axis=-1) - 1.0) * min(radii)
    return distance


@dataclass(frozen=True)
class Anatomy:
    """One patient's difference from the atlas: pose (rotation about z, shift, scale) and organ shape."""

    rotation: float
    shift: tuple[float, float, float]
    scale: tuple[float, float, float]
    lobe: float
    notch: float
    texture_phase: tuple[float, float, float]

    @classmethod
    def of(cls, seed: int) -> Anatomy:
        """Draw the patient of that seed."""
        rng = np.random.default_rng([seed, 0])
        x, y, z = rng.uniform(-1, 1, 3) * (4.0, 4.0, 3.0)
        a, b, c = rng.uniform(0.9, 1.1, 3)
        p, q, r = rng.uniform(0, 2 * np.pi, 3)
        rotation, lobe, notch = rng.uniform(-0.14, 0.14), rng.uniform(5.5, 8.0), rng.uniform(6.0, 8.5)
        return cls(float(rotation), (x, y, z), (a, b, c), float(lobe), float(notch), (p, q, r))

    def to_atlas(self, world: Points) -> Points:
        """Map world coordinates [..., 3] to atlas coordinates, both in mm."""
        cos, sin = np.cos(self.rotation), np.sin(self.rotation)
        turn = np.array([[cos, sin, 0.0], [-sin, cos, 0.0], [0.0, 0.0, 1.0]])
        atlas: Points = (world - np.array(self.shift)) @ turn.T / np.array(self.scale)
        return atlas

    def body(self, atlas: Points) -> Points:
        """Return the signed distance to the skin, mm, negative inside."""
        return _ellipsoid(atlas, (0, 0, 0), (41, 33, 70))

    def organ(self, atlas: Points) -> Points:
        """Return the signed distance to the organ, mm, negative inside."""
        bean = _ellipsoid(atlas, (18, 1, -1), (12, 15, 14))
        notch = _ellipsoid(atlas, (6, -3, -3), (self.notch, self.notch, 9))
        lobe = _ellipsoid(atlas, (23, 14, 7), (self.lobe, self.lobe, self.lobe))
        return np.minimum(np.maximum(bean, -notch), lobe)

    def decoy(self, atlas: Points) -> Points:
        """Return the signed distance to the organ's mirror image, mm, negative inside."""
        return self.organ(atlas * _MIRROR_X)

    def spine(self, atlas: Points) -> Points:
        """Return the signed distance to the spine, mm, negative inside."""
        return _ellipsoid(atlas, (0, -20, 0), (7, 7, 200))

    def texture(self, atlas: Points) -> Points:
        """Return a smooth pattern within [-1, 1] that depends on the point alone, not on the grid."""
        waves = np.sin(atlas * (0.31, 0.27, 0.23) + np.array(self.texture_phase))
        texture: Points = waves.prod(axis=-1)
        return texture

    def mask(self, world: Points) -> NDArray[np.uint8]:
        """Return 1 for points of `world` [..., 3] inside the organ, 0 elsewhere."""
        return (self.organ(self.to_atlas(world)) < 0).astype(np.uint8)


@lru_cache(maxsize=64)
def _fine(seed: int) -> tuple[tuple[float, float, float], float]:
    """Compute the organ's centroid (mm) and volume (mL) on a grid of 0.75 mm."""
    step = 0.75
    axes = [np.arange(-half + step / 2, half, step) for half in (FIELD_XY / 2, FIELD_XY / 2, FIELD_Z)]
    world = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    inside = world[Anatomy.of(seed).mask(world) == 1]
    x, y, z = inside.mean(axis=0)
    return (float(x), float(y), float(z)), len(inside) * step**3 / 1000


def true_centroid(seed: int) -> tuple[float, float, float]:
    """Return the true centre of mass of the organ, RAS mm."""
    return _fine(seed)[0]


def true_volume_ml(seed: int) -> float:
    """Return the true volume of the organ, mL."""
    return _fine(seed)[1]
