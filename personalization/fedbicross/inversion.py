"""Stage 2a: the losses that turn noise into images which a cluster's models recognise (DeepInversion).

Yin et al., Dreaming to Distill, 2020, as FedISCA and FedBiCross (Eq. 2) use it: cross-entropy to a chosen
class, total variation, and the distance of each batch norm's input from its running statistics.

Legend: B batch, C channels, K classes, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from personalization.networks.capabilities import BatchNorm, moving_norms, running, spatial_axes
from personalization.precision import to_float32

LARGEST_JITTER = 2


def total_variation(images_BCHW: Tensor) -> Tensor:
    """Sum the L2 norms (not squared) of the differences to four neighbours, each over the whole batch.

    The neighbours are horizontal, vertical and on both diagonals, as in DeepInversion's code.
    """
    x = images_BCHW
    differences = (
        x[:, :, :, 1:] - x[:, :, :, :-1],
        x[:, :, 1:, :] - x[:, :, :-1, :],
        x[:, :, 1:, 1:] - x[:, :, :-1, :-1],
        x[:, :, 1:, :-1] - x[:, :, :-1, 1:],
    )
    return torch.stack([torch.linalg.vector_norm(difference) for difference in differences]).sum()


@dataclass
class NormDistance:
    """Collects the distances of batch-norm inputs from the running statistics, over forward passes."""

    terms: list[Tensor] = field(default_factory=list)

    def total(self) -> Tensor:
        """Sum ||var - running var||_2 + ||mean - running mean||_2 over the layers; 0 without layers."""
        return torch.stack(self.terms).sum() if self.terms else torch.zeros(())

    def _hook(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, BatchNorm)
        running_mean, running_variance = running(module)
        found = to_float32(inputs[0])
        axes = (0, *spatial_axes(found))
        # Not torch.var_mean, which takes three times as long on a CPU.
        mean = found.mean(dim=axes, keepdim=True)
        variance = (found - mean).square().mean(dim=axes)
        self.terms.append(
            torch.linalg.vector_norm(variance - running_variance)
            + torch.linalg.vector_norm(mean.flatten() - running_mean)
        )


@contextmanager
def norm_distance(networks: Sequence[nn.Module]) -> Iterator[NormDistance]:
    """Within the context, collect the batch-norm terms of every forward pass of the networks."""
    distance = NormDistance()
    handles = [
        module.register_forward_pre_hook(distance._hook)
        for network in networks
        for module in moving_norms(network).values()
    ]
    try:
        yield distance
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class InversionWeights:
    """Weights of the terms.

    `per_member` divides the batch-norm term by the number of the teacher's models, because it grows with it.
    """

    total_variation: float = 2.5e-5
    batch_norm: float = 10.0
    per_member: bool = True


@dataclass(frozen=True)
class InversionLoss:
    """The weighted sum of Eq. 2, its unweighted terms, and the teacher's logits [B, K] for the images."""

    total: Tensor
    cross_entropy: Tensor
    total_variation: Tensor
    batch_norm: Tensor
    logits: Tensor


def inversion_loss(
    members: Sequence[nn.Module], images_BCHW: Tensor, labels_B: Tensor, weights: InversionWeights
) -> InversionLoss:
    """Compute CE(F(x), y) + a TV(x) + b BN(x), with F the mean of the members' logits, in evaluation mode."""
    for member in members:
        member.eval()
    with norm_distance(members) as distance:
        logits = torch.stack([to_float32(member(images_BCHW)) for member in members]).mean(dim=0)
    batch_norm = distance.total().to(images_BCHW.device)
    if weights.per_member:
        batch_norm = batch_norm / len(members)
    cross_entropy = functional.cross_entropy(logits, labels_B)
    variation = total_variation(images_BCHW)
    total = cross_entropy + weights.total_variation * variation + weights.batch_norm * batch_norm
    terms = (cross_entropy.detach(), variation.detach(), batch_norm.detach())
    return InversionLoss(total, *terms, logits)


def jitter(images_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Roll the whole batch by up to 2 pixels along each side, so that no pixel position is special."""
    offsets = torch.randint(-LARGEST_JITTER, LARGEST_JITTER + 1, (2,), generator=generator).tolist()
    return torch.roll(images_BCHW, offsets, dims=(2, 3))


def balanced_labels(count: int, classes: int) -> Tensor:
    """Return the labels 0, 1, …, K-1, 0, 1, …: [count] int64."""
    return torch.arange(count) % classes
