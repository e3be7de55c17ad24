"""The training of one network on one site's data, which methods and benchmarks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from personalization.precision import mixed_precision, to_float32
from personalization.transfer import CPU, sent
from training import headway
from training.local.data import Data
from training.local.norms import held_statistics, least_batch
from training.local.schedule import Batch, Schedule

# Of AdamW, where no other is given.
DECAY = 1e-5


# () -> scalar: what a method adds to the loss of a batch, of the weights as they are then.
Penalty = Callable[[], Tensor]


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
    device = next(network.parameters()).device
    optimiser.zero_grad(set_to_none=True)
    with mixed_precision(schedule.precision, device), held_statistics(network, batch.randomised):
        logits = network(sent(batch.images, device))
    loss = batch.loss(schedule.loss, to_float32(logits))
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

    Raises ValueError when there is nothing to train on.
    """
    if not len(data):
        raise ValueError("there is no slice to train on")
    headway.plan(schedule.planned(len(data)))
    for batch in data.batches(schedule, generator, least, device):
        yield batch
        headway.advance()
