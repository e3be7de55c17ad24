"""Examples in memory: images or whole volumes of a site, with the answers that are learned.

Shape suffixes: N examples (a volume's slices count one by one), C channels, H rows, W columns; X, Y, Z a
volume's axes, in the network's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from model_store.preprocessing import keep_largest
from model_store.preprocessing.windows import cut, tiles
from model_store.task import Task, VolumeGeometry

# Windows that `tiles` takes of all volumes together.
_MOST_TILES = 64
# Enough voxels of a class to centre patches on; a large organ has millions.
_MOST_PLACES = 10_000


@dataclass(frozen=True)
class Examples:
    """Images [N, C, H, W] float32 and class indices, with the patient and the origin of each image.

    `targets` has a class for every pixel, [N, H, W] uint8, or one for the image, [N] int64. `cases` has the
    names of files or cases, `positions` the index of the slice within its volume (0 for a 2-D image).
    `spacings` has the millimetres from slice to slice, row to row and column to column of each image as the
    network gets it, None where they are unknown; it is empty where they are not needed. `task` says what is
    done to answers; without one, nothing.
    """

    images: NDArray[np.float32]
    targets: NDArray[Any]
    patients: tuple[str, ...]
    cases: tuple[str, ...]
    positions: tuple[int, ...]
    spacings: tuple[tuple[float, ...] | None, ...] = ()
    task: Task | None = None

    def __len__(self) -> int:
        return len(self.images)

    @property
    def has_masks(self) -> bool:
        """Whether every pixel has a class, and not the image."""
        return self.targets.ndim > 1

    def take(self, indices: Sequence[int]) -> Examples:
        """Return some of the examples, in this order."""
        chosen = list(indices)
        return Examples(
            self.images[chosen],
            self.targets[chosen],
            tuple(self.patients[index] for index in chosen),
            tuple(self.cases[index] for index in chosen),
            tuple(self.positions[index] for index in chosen),
            tuple(self.spacings[index] for index in chosen if self.spacings),
            self.task,
        )

    def answered(self, classes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """A network's class indices [N, H, W], changed to the answer by the task's `keep_largest`.

        As the service does, with all slices of a scan as one volume, and on the network's pixels.
        """
        if self.task is None or not self.task.keep_largest:
            return classes
        names = list(zip(self.patients, self.cases, strict=True))
        for scan in dict.fromkeys(names):
            own = [index for index, name in enumerate(names) if name == scan]
            stack = classes[own].transpose(1, 2, 0)
            found = stack[..., 0] if len(own) == 1 else stack
            keep_largest(found, self.task)
            classes[own] = stack.transpose(2, 0, 1)
        return classes

    def with_foreground(self) -> Examples:
        """Return only the examples with a pixel of another class than background."""
        return self.take([index for index, target in enumerate(self.targets) if target.any()])


@dataclass(frozen=True)
class Volumes:
    """Whole volumes, on the task's spacing: images [C, X, Y, Z] float32 and class indices [X, Y, Z] uint8.

    Volumes have shapes of their own. A network is trained on patches of them and answers by windows, both of
    the sides in the geometry of `task`. `spacings` has the millimetres per voxel along each axis of each
    volume.
    """

    images: tuple[NDArray[np.float32], ...]
    targets: tuple[NDArray[np.uint8], ...]
    patients: tuple[str, ...]
    cases: tuple[str, ...]
    spacings: tuple[tuple[float, ...], ...]
    task: Task

    def __len__(self) -> int:
        return len(self.images)

    @property
    def geometry(self) -> VolumeGeometry:
        """Return the geometry of the task."""
        assert self.task.geometry is not None
        return self.task.geometry

    @property
    def has_masks(self) -> bool:
        """Whether every voxel has a class: always."""
        return True

    def take(self, indices: Sequence[int]) -> Volumes:
        """Return some of the volumes, in this order."""
        chosen = list(indices)
        return Volumes(
            tuple(self.images[index] for index in chosen),
            tuple(self.targets[index] for index in chosen),
            tuple(self.patients[index] for index in chosen),
            tuple(self.cases[index] for index in chosen),
            tuple(self.spacings[index] for index in chosen),
            self.task,
        )

    def with_foreground(self) -> Volumes:
        """Return only the volumes with a voxel of another class than background."""
        return self.take([index for index, target in enumerate(self.targets) if target.any()])

    @cached_property
    def foreground(self) -> tuple[tuple[NDArray[np.int64], ...], ...]:
        """Voxels [M, 3] of each class but background of each volume: at most 10,000, evenly drawn out."""
        found = []
        for target in self.targets:
            places = []
            for index in np.flatnonzero(np.bincount(target.ravel())):
                if index:
                    flat = np.flatnonzero(target == index)
                    flat = flat[:: -(-len(flat) // _MOST_PLACES)]
                    places.append(np.stack(np.unravel_index(flat, target.shape), axis=1))
            found.append(tuple(places))
        return tuple(found)

    def tiles(self, most: int = _MOST_TILES) -> Examples:
        """Windows of the volumes that do not overlap, or `most` of them, evenly drawn out: [N, C, *patch]."""
        patch = self.geometry.patch
        corners = [
            (index, corner)
            for index, image in enumerate(self.images)
            for corner in tiles(image.shape[1:], patch)
        ]
        chosen = corners[:: -(-len(corners) // most)] if corners else []
        images = np.zeros((len(chosen), len(self.images[0]) if self.images else 0, *patch), np.float32)
        targets = np.zeros((len(chosen), *patch), np.uint8)
        for row, (index, corner) in enumerate(chosen):
            images[row] = cut(self.images[index], corner, patch)
            targets[row] = cut(self.targets[index], corner, patch)
        return Examples(
            images,
            targets,
            tuple(self.patients[index] for index, _ in chosen),
            tuple(self.cases[index] for index, _ in chosen),
            tuple(range(len(chosen))),
        )


# What a site trains, validates or tests on.
Data: TypeAlias = Examples | Volumes


def slices_of(data: Data) -> Examples:
    """The data of what works on slices alone. Raises TypeError for volumes, which a run refuses earlier."""
    if isinstance(data, Volumes):
        raise TypeError("expected slices, found volumes")
    return data
