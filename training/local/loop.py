"""The training of one network on one site's data, which methods and benchmarks share.

Volumes are trained on by patches; slices and images as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from model_store.task import TaskKind
from personalization.domain_randomisation import randomise_half
from personalization.losses import DEFAULTS, LOSSES, Loss
from personalization.precision import Precision, mixed_precision, to_float32
from personalization.scanner import augment_intensities
from personalization.transfer import CPU, sent
from training.data.classification import labelled_batches
from training.data.examples import Data, Examples, Volumes
from training.data.segmentation.dataset import batches
from training.data.segmentation.patches import Motion, patch_batches
from training.local.norms import held_statistics, least_batch

OptimiserName = Literal["adam", "adamw", "sgd"]


# Of SGD.
MOMENTUM = 0.9


MOTION = Motion()


# Of AdamW, where no other is given.
DECAY = 1e-5


def task_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The default loss of the task that has these targets: masks [B, H, W], or classes [B]."""
    kind: TaskKind = "classification" if targets.ndim == 1 else "segmentation"
    return LOSSES[DEFAULTS[kind]].function(logits, targets)


# () -> scalar: what a method adds to the loss of a batch, of the weights as they are then.
Penalty = Callable[[], Tensor]


@dataclass(frozen=True)
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
        return self.steps or max(self.epochs * math.ceil(count / self.batch_size), self.least_steps)


class Batch(NamedTuple):
    """Images [B, C, ...], targets [B, ...], and whether domain randomisation changed all of the images."""

    images: Tensor
    targets: Tensor
    randomised: bool = False


def train_locally(
    network: nn.Module,
    data: Data,
    schedule: Schedule,
    generator: torch.Generator,
    penalty: Penalty | None = None,
) -> float:
    """Train in place with a fresh optimiser; returns the mean loss of its batches, with the penalty.

    Parameters that require no gradient stay as they are. `generator` alone decides order and augmentation.
    Raises ValueError when there is nothing to train on.
    """
    optimiser = new_optimiser(network, schedule)
    planned = schedule.planned(len(data))
    least = least_batch(network, data, schedule.batch_size)
    network.train()
    device, losses = next(network.parameters()).device, list[Tensor]()
    for batch in scheduled_batches(data, schedule, generator, least, device):
        if schedule.falls:
            for group in optimiser.param_groups:
                group["lr"] = schedule.learning_rate * (1 + math.cos(math.pi * len(losses) / planned)) / 2
        losses.append(take_step(network, optimiser, batch, schedule, penalty))
    return mean_loss(losses)


def take_step(
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
    batch: Batch,
    schedule: Schedule,
    penalty: Penalty | None = None,
) -> Tensor:
    """One step of the optimiser on a batch; returns the loss before it, with the penalty, on the device: who
    reads it waits until the step is done."""
    images, targets, randomised = batch
    device = next(network.parameters()).device
    optimiser.zero_grad(set_to_none=True)
    with mixed_precision(schedule.precision, device), held_statistics(network, randomised):
        logits = network(sent(images, device))
    loss = schedule.loss(to_float32(logits), sent(targets, device))
    if penalty is not None:
        loss = loss + penalty()
    torch.autograd.backward(loss)
    if schedule.clip is not None:
        nn.utils.clip_grad_norm_(network.parameters(), schedule.clip)
    optimiser.step()
    return loss.detach()


def mean_loss(losses: Sequence[Tensor]) -> float:
    """The mean of the losses of steps, which are read together when all are done; 0 of none."""
    return sum(torch.stack(list(losses)).tolist()) / len(losses) if losses else 0.0


def new_optimiser(network: nn.Module, schedule: Schedule) -> torch.optim.Optimizer:
    """The schedule's optimiser of all parameters, at the rate of its beginning."""
    parameters, rate, decay = network.parameters(), schedule.learning_rate, schedule.weight_decay
    if schedule.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=schedule.momentum, weight_decay=decay)
    if schedule.optimiser == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, amsgrad=schedule.amsgrad, weight_decay=decay or DECAY)
    return torch.optim.Adam(parameters, lr=rate, amsgrad=schedule.amsgrad, weight_decay=decay)


def scheduled_batches(
    data: Data,
    schedule: Schedule,
    generator: torch.Generator,
    least: int = 1,
    device: torch.device = CPU,
) -> Iterator[Batch]:
    """The batches of the schedule, in their order, on a device. None has fewer than `least` images.

    Patches are cut out of their volumes on the CPU; all else is augmented on the device.

    Raises ValueError when there is nothing to train on.
    """
    if not len(data):
        raise ValueError("there is no slice to train on")
    if isinstance(data, Volumes):
        motion = schedule.motion if schedule.augment else None
        steps, size = schedule.planned(len(data)), max(schedule.batch_size, least)
        drawn = patch_batches(data, steps, size, schedule.foreground, motion, generator)
        for images, targets in drawn:
            yield _changed(sent(images, device), sent(targets, device), schedule, generator)
        return
    done = 0
    for epoch in count():
        # An epoch may have fewer batches than images would fill, so epochs are counted as epochs.
        if schedule.steps is None and epoch >= schedule.epochs and done >= schedule.least_steps:
            return
        for batch in _epoch(data, schedule, generator, least, device):
            enough = (
                schedule.steps
                if schedule.steps is not None
                else (schedule.least_steps if epoch >= schedule.epochs else None)
            )
            if enough is not None and done >= enough:
                return
            yield batch
            done += 1


def _epoch(
    data: Examples, schedule: Schedule, generator: torch.Generator, least: int, device: torch.device
) -> Iterator[Batch]:
    """One pass over the data; targets are class indices [B, H, W], or [B]."""
    size, turned = schedule.batch_size, schedule.augment
    drawn: Iterator[tuple[Tensor, Tensor]] = (
        batches(data, size, generator, turned, least=least, device=device)
        if data.has_masks
        else (batch[:2] for batch in labelled_batches(data, size, generator, turned, least, device))
    )
    for images, targets in drawn:
        yield _changed(images, targets, schedule, generator)


def _changed(images: Tensor, targets: Tensor, schedule: Schedule, generator: torch.Generator) -> Batch:
    """The batch after domain randomisation, or after the drawn scanners that images with masks go through."""
    if schedule.randomise:
        changed, randomised = randomise_half(images, generator)
        return Batch(changed, targets, randomised)
    if schedule.intensity and targets.ndim > 1:
        return Batch(augment_intensities(images, schedule.intensity, generator), targets)
    return Batch(images, targets)
