"""Write the segmentation phantom to a folder. The bytes are the same every time."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from model_store.durable import naming
from model_store.task import Normalisation, Task, VolumeGeometry
from training.phantom.scanners import SCANNERS, make_volume

TASK = Task(
    name="phantom",
    labels={"organ": (1,)},
    plane="axial",
    normalisation=Normalisation(scope="volume", method="zscore"),
    size=(48, 48),
)

# The same volumes, segmented whole: windows of 72 x 72 x 40 mm.
VOLUMES = Task(
    name="phantom-volumes",
    labels={"organ": (1,)},
    geometry=VolumeGeometry(spacing=(3.0, 3.0, 4.0), patch=(24, 24, 10)),
)

# nibabel has no type annotations.
_Image: Any = nib.Nifti1Image

# Trains a U-Net to a Dice above 0.9 in about a minute on two cores. Few slices mean few steps, so the rate is
# higher than for real scans. It decays so that the running statistics of batch norm settle.
TRAINING: dict[str, Any] = {
    "rounds": 12,
    "width": 8,
    "batch_size": 8,
    "learning_rate": 0.004,
    "learning_rate_decay": 0.9,
}


def patient_seed(seed: int, site: str, index: int) -> int:
    """Derive the anatomy's seed of patient `index` at a site of the federation written with `seed`."""
    material = hashlib.sha256(f"phantom\0{seed}\0{site}\0{index}".encode()).digest()
    return int.from_bytes(material[:6], "big")


def write_federation(
    root: Path,
    sites: Sequence[str] = ("aster", "birch", "cedar", "dune"),
    patients_per_site: int = 8,
    size: int = 48,
    seed: int = 0,
    task: Task = TASK,
) -> Path:
    """Write task.yaml and, per site, images/, masks/ and cases.csv under `root`. Returns `root`.

    `task` is `TASK`, of slices, or `VOLUMES`. The files are the same.

    `sites` are names of SCANNERS. `size` is the network's input size, a multiple of 16, and about the
    in-plane matrix of the volumes. A volume has 12 to 14 slices.
    """
    root.mkdir(parents=True, exist_ok=True)
    sized = task.model_copy(update={"size": (size, size)}) if task.size else task
    sized.dump(root / "task.yaml")
    for site in sites:
        scanner = SCANNERS[site]
        affine, shape = scanner.grid(size)
        folder = root / site
        for part in ("images", "masks"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        rows = ["file,patient,split"]
        for index in range(patients_per_site):
            patient = f"{site}-{index + 1:02d}"
            voxels, mask = make_volume(scanner, patient_seed(seed, site, index), affine, shape)
            name = f"{patient}.nii.gz"
            for path, content in ((folder / "images" / name, voxels), (folder / "masks" / name, mask)):
                with naming(path):
                    path.write_bytes(nifti_bytes(content, affine))
            rows.append(f"{name},{patient},")
        (folder / "cases.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return root


def nifti_bytes(voxels: NDArray[np.int16] | NDArray[np.uint8], affine: NDArray[np.float64]) -> bytes:
    """Encode a .nii.gz. Its bytes depend only on the arguments."""
    image = _Image(voxels, affine)
    image.header.set_xyzt_units("mm")
    image.set_qform(affine, code=1)
    content: bytes = image.to_bytes()
    return gzip.compress(content, compresslevel=6, mtime=0)
