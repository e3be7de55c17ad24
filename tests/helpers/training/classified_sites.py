"""Hospitals in memory for tests of methods that classify: bright squares in one of two corners."""

from __future__ import annotations

import numpy as np

from model_store.task import Task
from training.data.classification import ImageSet, LabelledData

CORNERS = Task(name="corners", kind="classification", class_names=("left", "right"), size=(16, 16))


def images(count: int, seed: int) -> ImageSet:
    draw = np.random.default_rng(seed)
    labels = draw.integers(2, size=count)
    pixels = draw.normal(size=(count, 1, 16, 16)).astype(np.float32)
    for image, label in zip(pixels, labels, strict=True):
        image[0, 2:7, (2, 9)[label] : (7, 14)[label]] += 2
    names = tuple(map(str, range(count)))
    return ImageSet(pixels, labels, names, names, (0,) * count)


def labelled_data(name: str, train: int, val: int, seed: int) -> LabelledData:
    return LabelledData(name, images(train, seed), images(val, seed + 1), images(0, 0), None)
