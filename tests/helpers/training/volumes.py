"""Sites with volumes in memory for tests of methods: balls of one brightness on noise."""

from __future__ import annotations

import numpy as np

from model_store.task import Task, VolumeGeometry
from training.local.site import SiteData
from training.local.volumes import Volumes

GEOMETRY = VolumeGeometry(spacing=(1.0, 1.0, 2.0), patch=(16, 16, 8))
BALLS = Task(name="balls", labels={"ball": (1,)}, geometry=GEOMETRY)


def volumes(count: int, seed: int, *, contrast: float = 2.0, task: Task = BALLS) -> Volumes:
    """`count` volumes of patients of their own; some sides are shorter than the patch's, most are longer."""
    draw = np.random.default_rng(seed)
    images, targets = [], []
    for _ in range(count):
        sides = draw.integers((14, 16, 7), (24, 22, 12))
        places = np.stack(np.meshgrid(*map(np.arange, sides), indexing="ij"), axis=-1)
        centre = sides / 2 + draw.uniform(-2, 2, 3)
        inside = ((places - centre) * (1, 1, 2)).astype(float)
        target = ((inside**2).sum(axis=-1) < 36).astype(np.uint8)
        image = draw.normal(size=(1, *sides)) + contrast * target
        images.append(image.astype(np.float32))
        targets.append(target)
    names = tuple(f"p{seed}-{index}" for index in range(count))
    return Volumes(tuple(images), tuple(targets), names, names, ((1.0, 1.0, 2.0),) * count, task)


def volume_data(name: str, train: int, val: int, seed: int, test: int = 0) -> SiteData:
    return SiteData(name, volumes(train, seed), volumes(val, seed + 100), volumes(test, seed + 200), None)
