"""Hospitals in memory for tests of methods that classify: bright squares in one of two corners."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import nibabel as nib
import numpy as np

from model_store.task import Task
from training.local.images import Images
from training.local.site import SiteData

CORNERS = Task(name="corners", kind="classification", class_names=("left", "right"), size=(16, 16))
VOLUMES = "name: light\nkind: classification\nclass_names: [dark, light]\nsize: [8, 8]\n"


def images(count: int, seed: int) -> Images:
    draw = np.random.default_rng(seed)
    labels = draw.integers(2, size=count)
    pixels = draw.normal(size=(count, 1, 16, 16)).astype(np.float32)
    for image, label in zip(pixels, labels, strict=True):
        image[0, 2:7, (2, 9)[label] : (7, 14)[label]] += 2
    names = tuple(map(str, range(count)))
    return Images(pixels, labels, names, names, (0,) * count)


def labelled_data(name: str, train: int, val: int, seed: int) -> SiteData[Images]:
    return SiteData(name, images(train, seed), images(val, seed + 1), images(0, 0), None)


def write_volumes(root: Path, sites: Sequence[str], slices: int = 9) -> Path:
    """Write a task, and at every site three dark and three light volumes. Returns `root`."""
    draw = np.random.default_rng(0)
    for site in sites:
        for label, brightness in (("dark", 100), ("light", 500)):
            folder = root / site / label
            folder.mkdir(parents=True)
            for number in range(3):
                voxels = draw.normal(brightness, 20, (16, 16, slices)).astype(np.int16)
                nib.save(nib.Nifti1Image(voxels, np.diag([1, 1, 3, 1])), folder / f"v{number}.nii.gz")
    (root / "task.yaml").write_text(VOLUMES)
    return root
