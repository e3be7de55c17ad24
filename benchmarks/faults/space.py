"""The smallest job: a routing space of tiny networks, and scans of phantom patients."""

from __future__ import annotations

from benchmarks.harness.random_space import publish_random_space
from model_store.store import Store
from training.phantom import SCANNERS, TASK, make_volume
from training.phantom.federation import nifti_bytes

NAME = "faults"
SIZE = 32


def publish_space(store: Store) -> None:
    """Publish a routing space of U-Nets of width 4."""
    task = TASK.model_copy(update={"size": (SIZE, SIZE)})
    publish_random_space(store, NAME, task, width=4, run=NAME)


def scan_bytes(patient: int) -> bytes:
    """A .nii.gz of a phantom patient, some kilobytes."""
    scanner = SCANNERS["dune"]
    affine, shape = scanner.grid(SIZE)
    voxels, _ = make_volume(scanner, patient, affine, shape)
    return nifti_bytes(voxels, affine)
