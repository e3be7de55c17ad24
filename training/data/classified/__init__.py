"""Federations of classified images: folders by class, or an .npz shared out among clients."""

from __future__ import annotations

from training.data.classified.dataset import ImageSet, LabelledData, labelled_batches
from training.data.classified.folders import holds_classes, load_folders
from training.data.classified.npz import load_npz
from training.data.classified.partition import Partition, share_out

__all__ = [
    "ImageSet",
    "LabelledData",
    "Partition",
    "holds_classes",
    "labelled_batches",
    "load_folders",
    "load_npz",
    "share_out",
]
