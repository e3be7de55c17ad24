"""How a network is trained on one site: the schedule, the motion of patches, and a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from model_store.task import TaskKind
from personalization.losses import DEFAULTS, LOSSES, Loss
from personalization.precision import Precision
from personalization.told import Told
from personalization.transfer import sent

OptimiserName = Literal["adam", "adamw", "sgd"]
# When training randomises domains (`personalization.domain_randomisation`).
DomainRandomisation = Literal["none", "late", "throughout"]


# Of SGD.
MOMENTUM = 0.9


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


MOTION = Motion()


def task_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The default loss of the task that has these targets: masks [B, H, W], or classes [B]."""
    kind: TaskKind = "classification" if targets.ndim == 1 else "segmentation"
    return LOSSES[DEFAULTS[kind]].function(logits, targets)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a network is trained on one site: `steps` batches, or `epochs` passes when `steps` is None.

    With passes there are at least `least_steps` batches. `falls` lets the rate fall by a cosine to nothing
    over these batches; otherwise it stays. `intensity` is the severity of the drawn scanners
    (`personalization.scanner`) that half of a batch's slices go through; 0 for none. With `randomise` there
    is domain randomisation of half of the batches instead. `momentum` is of SGD. `weight_decay` is added to
    the gradient, times the weights (AdamW: taken from the weights). A gradient is clipped to the norm `clip`,
    if there is one. `loss` is of the logits and targets of a batch.

    Of volumes, a batch is of patches, a pass has as many patches as there are volumes, `foreground` is the
    share of patches that are centred on a target, and `motion` says how patches are turned where `augment`
    is on.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 16
    learning_rate: float = 1e-3
    amsgrad: bool = False
    augment: bool = True
    precision: Precision = "float32"
    optimiser: OptimiserName = "adam"
    least_steps: int = 0
    falls: bool = False
    intensity: float = 0.0
    momentum: float = MOMENTUM
    weight_decay: float = 0.0
    clip: float | None = None
    loss: Loss = task_loss
    randomise: bool = False
    foreground: float = 1 / 3
    motion: Motion = MOTION

    def planned(self, count: int) -> int:
        """The number of batches, of so many examples."""
        return planned_batches(count, self.epochs, self.batch_size, self.steps, self.least_steps)


def planned_batches(count: int, epochs: int, batch_size: int, steps: int | None, least_steps: int) -> int:
    """The batches of a round, of so many examples: `steps`, or those of the epochs, and `least_steps`."""
    return steps or max(epochs * math.ceil(count / batch_size), least_steps)


class Batch(NamedTuple):
    """Images [B, C, ...], targets [B, ...], and whether domain randomisation changed all of the images.

    `told` says what the targets can tell; None: everything.
    """

    images: Tensor
    targets: Tensor
    randomised: bool = False
    told: Told | None = None

    def loss(self, loss: Loss, logits: Tensor) -> Tensor:
        """A loss of the batch's logits, on their device, of what the targets can tell."""
        known = loss if self.told is None else self.told.loss(loss)
        return known(logits, sent(self.targets, logits.device))


def randomises(choice: DomainRandomisation, done: int, planned: int) -> bool:
    """Whether the round, or epoch, after `done` of `planned` has domain randomisation."""
    return choice == "throughout" or (choice == "late" and done >= planned // 2)


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
