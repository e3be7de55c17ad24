"""Classification data: folders by class, or an .npz divided among clients."""

from __future__ import annotations

from training.data.classification.folders import CLASSES
from training.data.classification.npz import load_npz
from training.data.classification.partition import Partition, share_out

__all__ = [
    "CLASSES",
    "Partition",
    "load_npz",
    "share_out",
]
