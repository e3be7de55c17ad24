"""Eight simulated scanners that image the same anatomy with different grids, contrast and noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.phantom.anatomy import FIELD_XY, FIELD_Z, Anatomy, Points

_WORLD_AXIS = {"R": (0, 1), "L": (0, -1), "A": (1, 1), "P": (1, -1), "S": (2, 1), "I": (2, -1)}


@dataclass(frozen=True)
class Tissues:
    """Brightness of each tissue within [0, 1], before the scanner's response."""

    body: float = 0.40
    fat: float = 0.58
    organ: float = 0.72
    decoy: float = 0.20
    spine: float = 0.95


@dataclass(frozen=True)
class Scanner:
    """A scanner: grid (matrix relative to the federation's, slices, stored axes, tilt) and response.

    `response` is the exponent of the brightness curve. `noise` is a standard deviation and `bias` the
    amplitude of smooth shading, both as shares of full brightness. `blur` is the width of an edge in mm.
    `gain` and `offset` map brightness to raw intensities.
    """

    name: str
    axes: str
    matrix: float
    slices: int
    response: float
    noise: float
    bias: float
    blur: float
    gain: float
    offset: float = 0.0
    tilt: float = 0.0
    tissues: Tissues = Tissues()

    def grid(self, size: int) -> tuple[NDArray[np.float64], tuple[int, int, int]]:
        """Return the affine (voxel -> RAS mm) and the shape in which this scanner stores a volume."""
        side = round(size * self.matrix)
        voxel = (FIELD_XY / side, FIELD_XY / side, FIELD_Z / self.slices)
        counts = (side, side, self.slices)
        affine = np.zeros((4, 4))
        shape = []
        for column, letter in enumerate(self.axes):
            axis, sign = _WORLD_AXIS[letter]
            affine[axis, column] = sign * voxel[axis]
            shape.append(counts[axis])
        tilt = np.deg2rad(self.tilt)
        about_x = np.array([[1, 0, 0], [0, np.cos(tilt), -np.sin(tilt)], [0, np.sin(tilt), np.cos(tilt)]])
        affine[:3, :3] = about_x @ affine[:3, :3]
        # The centre of the box is the world's origin, for every orientation of the axes.
        affine[:3, 3] = -affine[:3, :3] @ ((np.array(shape) - 1) / 2)
        affine[3, 3] = 1.0
        return affine, (shape[0], shape[1], shape[2])


# Dune serves as the hospital outside the federation: stronger shading, more noise and lower contrast.
SCANNERS: dict[str, Scanner] = {
    scanner.name: scanner
    for scanner in (
        Scanner("aster", "RAS", 1.0, 12, response=1.0, noise=0.03, bias=0.05, blur=0.8, gain=1000),
        Scanner(
            "birch", "LPS", 1.15, 12, response=0.85, noise=0.05, bias=0.10, blur=1.2, gain=340, offset=20
        ),
        Scanner(
            "cedar", "PSR", 1.3, 14, response=1.2, noise=0.04, bias=0.1, blur=1.0, gain=2600, offset=-300
        ),
        Scanner(
            "dune",
            "ILA",
            0.9,
            12,
            response=0.5,
            noise=0.09,
            bias=0.35,
            blur=1.8,
            gain=180,
            offset=60,
            tilt=8.0,
            tissues=Tissues(body=0.46, fat=0.40, organ=0.66, decoy=0.30, spine=0.60),
        ),
        Scanner("elder", "RAS", 1.1, 12, response=0.7, noise=0.04, bias=0.25, blur=0.9, gain=900, offset=50),
        Scanner("furze", "LAS", 0.95, 13, response=1.5, noise=0.06, bias=0.08, blur=1.4, gain=500),
        Scanner(
            "grove",
            "RPI",
            1.2,
            12,
            response=0.9,
            noise=0.03,
            bias=0.30,
            blur=2.2,
            gain=1500,
            offset=-100,
            tissues=Tissues(body=0.36, fat=0.50, organ=0.62, decoy=0.24, spine=0.80),
        ),
        Scanner(
            "heath",
            "LPS",
            1.0,
            14,
            response=0.6,
            noise=0.07,
            bias=0.15,
            blur=1.1,
            gain=250,
            offset=30,
            tissues=Tissues(body=0.44, fat=0.64, organ=0.70, decoy=0.28, spine=0.85),
        ),
    )
}


def make_volume(
    scanner: Scanner, seed: int, affine: NDArray[np.float64], shape: tuple[int, int, int]
) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """Image patient `seed` with `scanner` on any grid: voxels [I, J, K] and the true organ mask [I, J, K].

    `affine` maps voxel indices to RAS mm and may be oblique. Everything but the noise is a function of the
    world point, so two grids show the same patient. The mask marks the voxels with their centre in the organ.
    """
    anatomy = Anatomy.of(seed)
    indices = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1)
    world: Points = indices @ affine[:3, :3].T + affine[:3, 3]
    atlas = anatomy.to_atlas(world)
    tissues, blur = scanner.tissues, scanner.blur
    body = anatomy.body(atlas)
    organ = anatomy.organ(atlas)
    bright = np.zeros(shape)
    for distance, value in (
        (body, tissues.fat),
        (body + 4.0, tissues.body),
        (anatomy.decoy(atlas), tissues.decoy),
        (organ, tissues.organ),
        (anatomy.spine(atlas), tissues.spine),
    ):
        inside = 1.0 / (1.0 + np.exp(np.clip(distance / (blur / 2), -50, 50)))
        bright += inside * (value - bright)
    bright += 0.04 * anatomy.texture(atlas) * (body < 0)
    shading = 1.0 + scanner.bias * np.sin(world[..., 0] / 35 + 0.6) * np.cos(world[..., 1] / 45)
    noise = np.random.default_rng([seed, 1]).normal(0.0, scanner.noise, shape)
    seen = np.clip(bright, 0, None) ** scanner.response * shading + noise
    raw = np.clip(np.rint(scanner.gain * seen + scanner.offset), -32768, 32767)
    return raw.astype(np.int16), (organ < 0).astype(np.uint8)
