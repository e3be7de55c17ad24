"""A synthetic federation made by code: known anatomy, four scanners, and no patient in it."""

from __future__ import annotations

from training.phantom.anatomy import Anatomy, true_centroid, true_volume_ml
from training.phantom.federation import TASK, TRAINING, patient_seed, write_federation
from training.phantom.scanners import SCANNERS, Scanner, make_volume

__all__ = [
    "SCANNERS",
    "TASK",
    "TRAINING",
    "Anatomy",
    "Scanner",
    "make_volume",
    "patient_seed",
    "true_centroid",
    "true_volume_ml",
    "write_federation",
]
