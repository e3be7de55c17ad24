"""Whole volumes with masks: a network is trained on patches of them, and answers by windows.

A patch is one sampling of its volume: crop, rotation, zoom and flips in one step, so that a turned patch
reads the voxels beyond its borders. Outside a volume there is zero, as around the windows of serving.

Legend: C channels, X, Y, Z the volume's axes, in the network's order, B patches of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import grid_sample, pad
from typing_extensions import override

from model_store.preprocessing import (
    PreparedVolume,
    VolumeGrid,
    finish,
    onto_grid,
    outputs_of,
    prepare_volume,
    price_of,
    windowed,
)
from model_store.preprocessing.windows import cut, tiles
from model_store.scan import Scan
from model_store.task import Task, VolumeGeometry
from personalization.outputs import outputs
from personalization.told import IGNORED, Told
from personalization.transfer import sent
from training.algorithm import State
from training.data.cases import Case
from training.local.data import Answers, Examples, ScanSize
from training.local.masks import Drawn, Masked
from training.local.schedule import Batch, Motion, Schedule
from training.local.slices import Slices

# Windows that `tiles` takes of all volumes together.
_MOST_TILES = 64
# Enough voxels of a class to centre patches on; a large organ has millions.
_MOST_PLACES = 10_000
# Steps at a site from which on patches are moved and changed as much as in a long training. In a short one
# augmentation costs more than it brings (docs/how-to/volumes.md).
_LONG = 1000


@dataclass(frozen=True)
class Volumes(Masked):
    """Whole volumes, on the task's spacing: images [C, X, Y, Z] float32 and class indices [X, Y, Z] uint8.

    Volumes have shapes of their own. A network is trained on patches of them and answers by windows, both of
    the sides in the geometry of `task`. `spacings` has the millimetres per voxel along each axis of each
    volume, `drawn` the scan behind each; without it, volumes are scans of the network's voxels.
    """

    name = "volumes"
    short_pass = True
    most_met = _MOST_TILES

    images: tuple[NDArray[np.float32], ...]
    targets: tuple[NDArray[np.uint8], ...]
    patients: tuple[str, ...]
    cases: tuple[str, ...]
    spacings: tuple[tuple[float, ...], ...]
    task: Task
    drawn: tuple[Drawn, ...] = ()
    told: Told | None = None

    @override
    def __len__(self) -> int:
        return len(self.images)

    @property
    def geometry(self) -> VolumeGeometry:
        """Return the geometry of the task."""
        assert self.task.geometry is not None
        return self.task.geometry

    @classmethod
    @override
    def of_case(cls, case: Case, scan: Scan, task: Task) -> tuple[Self, PreparedVolume]:
        prepared = prepare_volume(scan, task)
        grid = prepared.grid
        drawn = Drawn.of(case, scan, task, grid)
        classes = onto_grid(drawn.truth, grid)
        own = (prepared.volume,), (classes,), (case.patient,), (case.name,), (grid.spacing,)
        return cls(*own, task, (drawn,)), prepared

    @classmethod
    @override
    def joined(cls, parts: Sequence[Self], task: Task) -> Self:
        return cls(
            tuple(image for each in parts for image in each.images),
            tuple(target for each in parts for target in each.targets),
            tuple(patient for each in parts for patient in each.patients),
            tuple(case for each in parts for case in each.cases),
            tuple(spacing for each in parts for spacing in each.spacings),
            task,
            tuple(drawn for each in parts for drawn in each.drawn),
        )

    @classmethod
    @override
    def size_of(cls, case: Any, task: Task) -> ScanSize:
        assert task.geometry is not None
        price = price_of(cls.reader(task)(case), task)
        return ScanSize(len(tiles(price.grid.shape, task.geometry.patch)), price.passes)

    @override
    def take(self, indices: Sequence[int]) -> Self:
        chosen = list(indices)
        return type(self)(
            tuple(self.images[index] for index in chosen),
            tuple(self.targets[index] for index in chosen),
            tuple(self.patients[index] for index in chosen),
            tuple(self.cases[index] for index in chosen),
            tuple(self.spacings[index] for index in chosen),
            self.task,
            tuple(self.drawn[index] for index in chosen if self.drawn),
            self.told,
        )

    # ------------------------------------------------------------------ training

    @classmethod
    @override
    def augmentation(cls, steps: int) -> float:
        return min(steps / _LONG, 1.0)

    @override
    def batches(
        self, schedule: Schedule, generator: torch.Generator, least: int, device: torch.device
    ) -> Iterator[Batch]:
        """Patches are cut out of their volumes on the CPU; all else is done on the device."""
        motion = schedule.motion if schedule.augment else None
        steps, size = schedule.planned(len(self)), max(schedule.batch_size, least)
        drawn = patch_batches(self, steps, size, schedule.foreground, motion, generator)
        for images, targets in drawn:
            yield self.changed(sent(images, device), sent(targets, device), schedule, generator)

    @override
    def single(self, batch_size: int) -> NDArray[np.float32] | None:
        """Batches of patches are full."""
        return None if batch_size > 1 else self.tiles(1).single(batch_size)

    @cached_property
    def foreground(self) -> tuple[tuple[NDArray[np.int64], ...], ...]:
        """Voxels [M, 3] of each class but background of each volume: at most 10,000, evenly drawn out."""
        found = []
        for target in self.targets:
            places = []
            for index in np.flatnonzero(np.bincount(target.ravel())):
                if index not in (0, IGNORED):
                    flat = np.flatnonzero(target == index)
                    flat = flat[:: -(-len(flat) // _MOST_PLACES)]
                    places.append(np.stack(np.unravel_index(flat, target.shape), axis=1))
            found.append(tuple(places))
        return tuple(found)

    @override
    def changed_by(self, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Self:
        return replace(self, images=tuple(change(image[np.newaxis])[0] for image in self.images))

    @override
    def met(self) -> Slices:
        return self.tiles().met()

    def tiles(self, most: int = _MOST_TILES) -> Slices:
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
        return Slices(
            images,
            targets,
            tuple(self.patients[index] for index, _ in chosen),
            tuple(self.cases[index] for index, _ in chosen),
            tuple(range(len(chosen))),
            told=self.told,
        )

    # ------------------------------------------------------------------ answers and scores

    @property
    @override
    def scans_drawn(self) -> tuple[Drawn, ...]:
        if self.drawn:
            return self.drawn
        own = zip(self.patients, self.targets, self.spacings, strict=True)
        return tuple(
            Drawn(patient, VolumeGrid.of_network(target.shape, spacing), target, spacing)
            for patient, target, spacing in own
        )

    @override
    def answers(self, network: nn.Module, batch_size: int, device: torch.device) -> list[Tensor]:
        kind, regions = outputs_of(self.task), bool(self.task.regions)

        def run(patch: NDArray[np.float32]) -> NDArray[np.float32]:
            found: NDArray[np.float32] = outputs(network, patch[np.newaxis], kind, regions=regions)[0]
            return found

        found = []
        for image, drawn in zip(self.images, self.scans_drawn, strict=True):
            assert isinstance(drawn.grid, VolumeGrid)
            planes = windowed(image, drawn.grid, self.task, run)
            found.append(torch.from_numpy(finish(drawn.grid, self.task, planes)[0].copy()))
        return found

    @override
    def pictured(self, answers: Mapping[str, Answers]) -> tuple[Examples, dict[str, NDArray[np.uint8]]]:
        """The axial slice of each volume that has the most foreground, on one size of picture."""
        axes = self.geometry.axes
        # Rows run to posterior and columns to the patient's left; stored axes are shown as they are.
        depth = next((axis for axis, end in enumerate(axes) if end in "SI"), 2)
        across = [axis for axis in range(3) if axis != depth]
        rows, columns = sorted(across, key=lambda axis: axes[axis] in "RL")
        turned = [axis for axis in (rows, columns) if axes[axis] in "AR"]
        at = [int((target > 0).sum(axis=tuple(across)).argmax()) for target in self.targets]
        sides = [target.shape for target in self.targets]
        height = max((side[rows] for side in sides), default=1)
        width = max((side[columns] for side in sides), default=1)

        def picture(volume: NDArray[Any], index: int) -> NDArray[Any]:
            """[C, H, W] of a volume [C, X, Y, Z], with the least value around it."""
            plane = np.flip(volume, tuple(1 + axis for axis in turned))
            plane = plane.transpose(0, 1 + depth, 1 + rows, 1 + columns)[:, at[index]]
            missing = (height - plane.shape[1], width - plane.shape[2])
            margins = ((each // 2, each - each // 2) for each in missing)
            return np.pad(plane, ((0, 0), *margins), constant_values=plane.min())

        def here(found: Answers) -> list[NDArray[np.uint8]]:
            """On the network's grid."""
            return [
                onto_grid(each.numpy(), drawn.grid)
                for each, drawn in zip(found, self.scans_drawn, strict=True)
                if isinstance(drawn.grid, VolumeGrid)
            ]

        def classes(found: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
            pictures = [picture(each[None], index)[0] for index, each in enumerate(found)]
            return np.array(pictures, np.uint8).reshape(-1, height, width)

        images = np.array([picture(image, index) for index, image in enumerate(self.images)], np.float32)
        shown = Slices(images, classes(self.targets), self.patients, self.cases, tuple(at))
        return shown, {name: classes(here(found)) for name, found in answers.items()}

    # ------------------------------------------------------------------ for centralised training

    @override
    def packed(self) -> State:
        """All voxels in one row, and the sides of each volume."""
        channels = len(self.images[0]) if len(self) else 1
        images = [image.reshape(channels, -1) for image in self.images]
        answers = [target.ravel() for target in self.targets]
        sides = torch.tensor([target.shape for target in self.targets], dtype=torch.int64)
        return {
            "images": torch.from_numpy(
                np.concatenate([np.empty((channels, 0), np.float32), *images], axis=1)
            ),
            "answers": torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *answers])),
            "sides": sides.reshape(-1, 3),
            "spacings": torch.tensor(self.spacings, dtype=torch.float64).reshape(-1, 3),
        }

    @classmethod
    @override
    def unpacked(cls, state: State, task: Task) -> Self:
        sides, sizes = state["sides"].tolist(), state["sides"].prod(dim=1).tolist()
        voxels, classes = torch.split(state["images"], sizes, dim=1), torch.split(state["answers"], sizes)
        unnamed = ("",) * len(sides)
        return cls(
            tuple(each.reshape(-1, *own).numpy() for own, each in zip(sides, voxels, strict=True)),
            tuple(each.reshape(own).numpy() for own, each in zip(sides, classes, strict=True)),
            unnamed,
            unnamed,
            tuple(map(tuple, state["spacings"].tolist())),
            task,
        )


def patch_batches(
    volumes: Volumes,
    steps: int,
    batch_size: int,
    foreground: float,
    motion: Motion | None,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `steps` batches: images [B, C, *patch] float32, targets [B, *patch] uint8.

    Volumes come in a shuffled order, each as often as any other but for one. The last patches of a batch, at
    least a share `foreground` of it, are centred on a voxel of a class that is drawn among those of the
    volume; the others are anywhere (nnU-Net's rule). All draws come from `generator`, one after the other.
    """
    order: list[int] = []
    anywhere = round(batch_size * (1 - foreground))
    for _ in range(steps):
        samples = []
        for place in range(batch_size):
            if not order:
                order = torch.randperm(len(volumes), generator=generator).tolist()
            index = order.pop()
            corner = _corner(volumes, index, place >= anywhere, generator)
            matrix = motion.draw(volumes.spacings[index], generator) if motion else None
            if matrix is not None:
                matrix = _within_slices(matrix, volumes.geometry.patch)
            samples.append(patch_of(volumes, index, corner, matrix))
        images, targets = zip(*samples, strict=True)
        yield torch.stack(images), torch.stack(targets)


def patch_of(
    volumes: Volumes, index: int, corner: Sequence[int], matrix: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The patch [C, *patch] of a volume with its lowest voxel at `corner`, and its classes [*patch].

    With a matrix it is turned about its centre: images are read linearly, classes from the nearest voxel.
    """
    image, target = (torch.from_numpy(each[index]) for each in (volumes.images, volumes.targets))
    sides, patch = image.shape[1:], volumes.geometry.patch
    if matrix is None:
        ends = [start + side for start, side in zip(corner, patch, strict=True)]
        inside = tuple(
            slice(max(start, 0), min(end, side)) for start, end, side in zip(corner, ends, sides, strict=True)
        )
        missing: list[int] = []
        for start, end, side in reversed(list(zip(corner, ends, sides, strict=True))):
            missing += [max(-start, 0), max(end - side, 0)]
        return pad(image[:, *inside], missing), pad(target[inside], missing)
    offsets = torch.meshgrid(
        *(torch.arange(side, dtype=torch.float64) - (side - 1) / 2 for side in patch), indexing="ij"
    )
    centre = torch.tensor([start + (side - 1) / 2 for start, side in zip(corner, patch, strict=True)])
    places = torch.stack(offsets, dim=-1) @ matrix.T + centre
    # grid_sample's coordinates run from -1 to 1 between the outer faces, the last axis first.
    grid = ((2 * places + 1) / torch.tensor(sides) - 1).flip(-1)[None].float()
    sampled = grid_sample(image[None], grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    classes = grid_sample(
        target[None, None].float(), grid, mode="nearest", padding_mode="zeros", align_corners=False
    )
    return sampled[0], classes[0, 0].to(torch.uint8)


def _within_slices(matrix: Tensor, patch: Sequence[int]) -> Tensor:
    """The same without what leads out of a patch of one slice."""
    for axis in (axis for axis, side in enumerate(patch) if side == 1):
        matrix[axis], matrix[:, axis], matrix[axis, axis] = 0.0, 0.0, 1.0
    return matrix


def _corner(volumes: Volumes, index: int, foreground: bool, generator: torch.Generator) -> list[int]:
    """A patch's lowest voxel: inside the volume, or centred where the volume is smaller than the patch."""
    sides, patch = volumes.images[index].shape[1:], volumes.geometry.patch
    uniform = torch.rand(5, generator=generator, dtype=torch.float64).tolist()
    places = volumes.foreground[index]
    centre: Sequence[int] | None = None
    if foreground and places:
        voxels = places[int(uniform[3] * len(places))]
        centre = voxels[int(uniform[4] * len(voxels))].tolist()
    corner = []
    for axis, (side, length) in enumerate(zip(sides, patch, strict=True)):
        free = side - length
        if free <= 0:
            corner.append(-(-free // 2))
        elif centre is None:
            corner.append(int(uniform[axis] * (free + 1)))
        else:
            corner.append(min(max(centre[axis] - length // 2, 0), free))
    return corner
