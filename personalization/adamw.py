"""Resumable AdamW training: moments are passed in and returned by parameter name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from personalization.state import State
from personalization.transfer import sent

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Optimiser:
    """AdamW's setting, and its moments after `taken` steps (none before the first)."""

    weight_decay: float = 1e-5
    moments: State = field(default_factory=dict)
    taken: int = 0


def cosine(peak: float, least: float, total: int, steps: range) -> list[float]:
    """Compute the learning rates of `steps`: a cosine from `peak` at step 0 to `least` at step `total`."""
    return [least + (peak - least) * (1 + math.cos(math.pi * step / total)) / 2 for step in steps]


def train_adamw(
    network: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    rates: Sequence[float],
    optimiser: Optimiser,
) -> tuple[float, Optimiser]:
    """Train a network in place, one batch per rate. Returns the mean loss and the new optimiser state.

    Parameters that require no gradient are not changed.

    `batches` yields (images [B, C, H, W], targets [B, H, W]) and may be infinite; `loss` computes a scalar
    from them. Moments belong to parameters by name, so a parameter keeps them if its value is replaced
    between calls. Raises ValueError if there are fewer batches than rates.
    """
    parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    device = next(iter(parameters.values())).device
    adamw = torch.optim.AdamW(parameters.values(), weight_decay=optimiser.weight_decay)
    for name, parameter in parameters.items() if optimiser.taken else ():
        adamw.state[parameter] = {
            # A copy on the device, because the step writes into it.
            **{
                moment: torch.empty_like(parameter).copy_(optimiser.moments[f"{moment}/{name}"])
                for moment in _MOMENTS
            },
            "step": torch.tensor(float(optimiser.taken)),
        }
    network.train()
    losses: list[Tensor] = []
    for rate, (images, targets) in zip(rates, batches, strict=False):
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.zero_grad(set_to_none=True)
        value = loss(sent(images, device), sent(targets, device))
        torch.autograd.backward(value)
        adamw.step()
        losses.append(value.detach())
    if len(losses) < len(rates) or not losses:
        raise ValueError(f"expected {len(rates)} batches to train on, found {len(losses)}")
    moments = {
        f"{moment}/{name}": adamw.state[parameter][moment].cpu().clone(memory_format=torch.contiguous_format)
        for moment in _MOMENTS
        for name, parameter in parameters.items()
    }
    taken = optimiser.taken + len(losses)
    # Read together when all are done: until then the host does not wait for a GPU.
    return sum(torch.stack(losses).tolist()) / len(losses), Optimiser(optimiser.weight_decay, moments, taken)
