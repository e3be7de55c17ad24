"""Classification data: folders by class, or an .npz divided among clients."""

from __future__ import annotations

from training.data.classification.folders import holds_classes, load_classes, load_folders
from training.data.classification.npz import load_npz
from training.data.classification.partition import Partition, share_out

__all__ = [
    "Partition",
    "holds_classes",
    "load_classes",
    "load_folders",
    "load_npz",
    "share_out",
]
