"""Steps of AdamW at a site, whose moments stay with it from round to round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from training.algorithm import State
from training.data.dataset import SliceSet, batches
from training.methods.trees import join, part

_MOMENTS = ("exp_avg", "exp_avg_sq")

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of a batch: (images [B, C, H, W], targets [B, H, W]) -> scalar."""


@dataclass(frozen=True)
class Optimiser:
    """What AdamW takes, and its moments after `taken` steps (none before the first)."""

    weight_decay: float
    moments: State
    taken: int


def cosine(peak: float, least: float, total: int, steps: range) -> list[float]:
    """The learning rates of `steps` out of `total`: from `peak` at step 0 towards `least` at step `total`."""
    return [least + (peak - least) * (1 + math.cos(math.pi * step / total)) / 2 for step in steps]


def train_adamw(
    network: nn.Module,
    slices: SliceSet,
    loss: Loss,
    rates: Sequence[float],
    optimiser: Optimiser,
    *,
    batch_size: int,
    augment: bool,
    generator: torch.Generator,
) -> tuple[float, Optimiser]:
    """Train in place, one step per rate; gives the mean loss and the optimiser after it.

    `generator` decides order and augmentation. Moments belong to parameters by name, so a parameter whose
    value was replaced meanwhile keeps them. Raises ValueError when there is nothing to train on.
    """
    if not len(slices):
        raise ValueError("there is no slice to train on")
    parameters = dict(network.named_parameters())
    device = next(iter(parameters.values())).device
    adamw = torch.optim.AdamW(parameters.values(), weight_decay=optimiser.weight_decay)
    for name, parameter in parameters.items() if optimiser.taken else ():
        kept = {moment: part(optimiser.moments, moment)[name] for moment in _MOMENTS}
        adamw.state[parameter] = {
            # A copy, on the device: the step writes into it.
            **{moment: torch.empty_like(parameter).copy_(tensor) for moment, tensor in kept.items()},
            "step": torch.tensor(float(optimiser.taken)),
        }
    endless = (batch for _ in count() for batch in batches(slices, batch_size, generator, augment))
    network.train()
    total = 0.0
    for rate, (images, targets) in zip(rates, endless, strict=False):
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.zero_grad(set_to_none=True)
        value = loss(images.to(device), targets.to(device))
        torch.autograd.backward(value)
        adamw.step()
        total += value.item()
    moments = {
        moment: {
            name: adamw.state[parameter][moment].cpu().clone(memory_format=torch.contiguous_format)
            for name, parameter in parameters.items()
        }
        for moment in _MOMENTS
    }
    return total / len(rates), Optimiser(optimiser.weight_decay, join(moments), optimiser.taken + len(rates))
