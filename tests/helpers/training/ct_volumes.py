"""Small made-up CT volumes in folders of hospitals, each with its own spacing, as NIfTI files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import nibabel as nib
import numpy as np

SITES = {"A": (6, (0.8, 0.8, 2.5)), "B": (8, (0.7, 0.7, 2.0)), "C": (6, (1.0, 1.0, 3.0))}


def write_volumes(
    root: Path,
    sites: Mapping[str, tuple[int, tuple[float, float, float]]] = SITES,
    shape: tuple[int, int, int] = (40, 36, 24),
) -> Path:
    """Write SITE/images and SITE/masks: a ball of 60 HU with a core of 90 HU, in fat, in air."""
    for index, (site, (count, spacing)) in enumerate(sites.items()):
        draw = np.random.default_rng(index)
        for part in ("images", "masks"):
            (root / site / part).mkdir(parents=True, exist_ok=True)
        for case in range(count):
            places = np.stack(np.indices(shape), axis=-1) - np.array(shape) / 2 - draw.uniform(-3, 3, 3)
            distance = np.linalg.norm(places * spacing, axis=-1)
            mask = ((distance < 9).astype(np.uint8) + (distance < 4)).astype(np.uint8)
            voxels = np.select([distance < 4, distance < 9, distance < 14], [90.0, 60.0, -100.0], -1000.0)
            voxels = np.round(voxels + draw.normal(0, 10, shape)).astype(np.int16)
            affine = np.diag([*spacing, 1.0])
            for part, content in (("images", voxels), ("masks", mask)):
                nib.save(nib.Nifti1Image(content, affine), root / site / part / f"case{case:02}.nii.gz")
    return root
