"""Draw the patches of volumes that a network is trained on: where they are, and how they are moved.

A patch is one sampling of its volume: crop, rotation, zoom and flips in one step, so that a turned patch
reads the voxels beyond its borders. Outside a volume there is zero, as around the windows of serving.

Legend: C channels, X, Y, Z the volume's axes, B patches of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from training.data.examples import Volumes


@dataclass(frozen=True)
class Motion:
    """How patches are moved: a share of them is turned and zoomed, and each axis is flipped by chance.

    Angles are in degrees, about each axis and in both directions; a zoom is a factor up to `zoom`, or its
    inverse. Nothing is flipped by default: a label may be of one side of the body.
    """

    moved: float = 0.5
    rotation: float = 15.0
    zoom: float = 1.15
    flip: float = 0.0

    def scaled(self, strength: float) -> Motion:
        """The same with fewer patches moved: for 0, none."""
        return Motion(self.moved * strength, self.rotation, self.zoom, self.flip * strength)

    def draw(self, spacing: Sequence[float], generator: torch.Generator) -> Tensor | None:
        """Draw the matrix [3, 3] from a patch's voxel offsets to the volume's; None: the patch stays.

        It turns in millimetres, whatever the spacing.
        """
        uniform = torch.rand(8, generator=generator, dtype=torch.float64)
        matrix = torch.diag(torch.where(uniform[5:8] < self.flip, -1.0, 1.0).double())
        if uniform[0] < self.moved:
            angles = (2 * uniform[1:4] - 1) * math.radians(self.rotation)
            zoom = math.exp(float(2 * uniform[4] - 1) * math.log(self.zoom))
            size = torch.tensor(list(spacing), dtype=torch.float64)
            matrix = _turn(angles.tolist()) * zoom * size[None, :] / size[:, None] @ matrix
        return None if torch.equal(matrix, torch.eye(3, dtype=torch.float64)) else matrix


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


def _turn(angles: Sequence[float]) -> Tensor:
    """The rotation [3, 3] about the first, then the second, then the third axis; angles in radians."""
    turn = torch.eye(3, dtype=torch.float64)
    for axis, angle in enumerate(angles):
        one, other = [each for each in range(3) if each != axis]
        about = torch.eye(3, dtype=torch.float64)
        about[one, one] = about[other, other] = math.cos(angle)
        about[one, other], about[other, one] = -math.sin(angle), math.sin(angle)
        turn = about @ turn
    return turn
