"""Synthetic federations for tests, demos and tutorials, without any patient's data.

One is for segmentation: volumes of a known anatomy from four simulated scanners. The other is for
classification: pictures of shapes from three simulated cameras, with unequal class shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_store.task import TaskKind
from training.phantom import shapes
from training.phantom.anatomy import Anatomy, true_centroid, true_volume_ml
from training.phantom.federation import TASK, TRAINING, VOLUMES, patient_seed, write_federation
from training.phantom.scanners import SCANNERS, Scanner, make_volume

__all__ = [
    "SCANNERS",
    "TASK",
    "TRAINING",
    "VOLUMES",
    "Anatomy",
    "Phantom",
    "Scanner",
    "make_volume",
    "patient_seed",
    "phantom_of",
    "true_centroid",
    "true_volume_ml",
    "write_federation",
]


@dataclass(frozen=True)
class Phantom:
    """A phantom federation: its folder's name, the function that writes it, and good training settings."""

    name: str
    write: Callable[[Path], Path]
    training: Mapping[str, Any]


_PHANTOMS: Mapping[TaskKind, Phantom] = {
    "segmentation": Phantom("phantom", write_federation, TRAINING),
    "classification": Phantom("shapes", shapes.write_shapes, shapes.TRAINING),
}


def phantom_of(kind: TaskKind) -> Phantom:
    """Return the phantom for tasks of that kind."""
    return _PHANTOMS[kind]
