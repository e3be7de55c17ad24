"""Write the classification phantom: shapes on noise, from three simulated cameras, in unequal class shares.

Two pairs of sites have the same camera and similar class shares, and one site differs, so the federation has
clusters to find. Every image is a function of the seed, the site and the image's number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model_store.task import Task

CLASSES = ("disc", "ring", "cross")


@dataclass(frozen=True)
class Camera:
    """A site's camera: contrast, brightness level and noise (of 255), brightness gradient, inversion."""

    contrast: float
    level: float
    noise: float
    slope: float = 0.0
    inverted: bool = False


@dataclass(frozen=True)
class PhantomHospital:
    """A site's camera, and the shares of its images among the classes. A share may be 0."""

    camera: Camera
    shares: tuple[float, float, float]


_SOFT = Camera(contrast=90, level=60, noise=14)
_HARD = Camera(contrast=140, level=70, noise=22, slope=40)
_NEGATIVE = Camera(contrast=110, level=190, noise=16, inverted=True)

HOSPITALS: dict[str, PhantomHospital] = {
    "elm": PhantomHospital(_SOFT, (0.60, 0.30, 0.10)),
    "fir": PhantomHospital(_SOFT, (0.50, 0.40, 0.10)),
    "hazel": PhantomHospital(_NEGATIVE, (0.10, 0.30, 0.60)),
    "larch": PhantomHospital(_NEGATIVE, (0.00, 0.40, 0.60)),
    "maple": PhantomHospital(_HARD, (0.34, 0.33, 0.33)),
}

TASK = Task(name="shapes", kind="classification", class_names=CLASSES, size=(28, 28))

# Enough to learn the shapes in a minute or two on two cores. Few images need small batches for enough steps.
TRAINING: Mapping[str, Any] = {
    "width": 4,
    "local_epochs": 20,
    "batch_size": 8,
    "learning_rate": 0.02,
    "epochs": 2,
    "steps": 12,
    "synthesis_batch": 24,
    "outer_steps": 3,
    "checkpoint_every": 4,
    "personal_rate": 0.005,
}


def write_shapes(
    root: Path,
    sites: Sequence[str] = tuple(HOSPITALS),
    images_per_site: int = 60,
    size: int = 28,
    seed: int = 0,
) -> Path:
    """Write task.yaml and a folder per site and class under `root`. Returns `root`.

    `sites` are names of HOSPITALS. The images are 8-bit grey PNGs of `size` x `size`.
    """
    root.mkdir(parents=True, exist_ok=True)
    TASK.model_copy(update={"size": (size, size)}).dump(root / "task.yaml")
    for site in sites:
        hospital = HOSPITALS[site]
        bounds = np.rint(np.cumsum(hospital.shares) * images_per_site).astype(int)
        for label, name in enumerate(CLASSES):
            first = bounds[label - 1] if label else 0
            for index in range(first, bounds[label]):
                folder = root / site / name
                folder.mkdir(parents=True, exist_ok=True)
                picture = make_shape(hospital.camera, label, size, image_seed(seed, site, index))
                Image.fromarray(picture, "L").save(folder / f"{site}-{index:03d}.png")
    return root


def image_seed(seed: int, site: str, index: int) -> int:
    """Derive the seed of image `index` at a site of the federation written with `seed`."""
    material = hashlib.sha256(f"shapes\0{seed}\0{site}\0{index}".encode()).digest()
    return int.from_bytes(material[:6], "big")


def make_shape(camera: Camera, label: int, size: int, seed: int) -> NDArray[np.uint8]:
    """Draw a shape as a camera shows it: [size, size]. Position, radius and noise depend on the seed."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:size, :size] / size
    y, x = draw.uniform(0.35, 0.65, 2)
    radius = draw.uniform(0.2, 0.3)
    distance = np.hypot(rows - y, columns - x)
    arms = np.minimum(np.abs(rows - y), np.abs(columns - x)) < 0.3 * radius
    shape = (
        distance < radius,
        np.abs(distance - radius) < 0.25 * radius,
        arms & (distance < 1.3 * radius),
    )[label]
    bright = camera.level + camera.slope * (columns - 0.5) + draw.normal(0, camera.noise, (size, size))
    bright += (-1 if camera.inverted else 1) * camera.contrast * shape
    picture: NDArray[np.uint8] = np.clip(np.rint(bright), 0, 255).astype(np.uint8)
    return picture
