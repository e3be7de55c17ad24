"""The head for quarter turns of a global model, which test-time training needs at a hospital (preset `ttt`).

Sun et al., Test-Time Training with Self-Supervision for Generalization under Distribution Shifts, ICML 2020:
the loss of every batch is that of the task, plus the cross-entropy of the turns of as many images, which go
through the same encoder. These are drawn for themselves: images of a batch may have been flipped both ways,
which is half a turn that the head could not tell.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.networks.rotation import required_turns, rotation_loss
from personalization.precision import Precision, mixed_precision
from personalization.transfer import sent
from training.algorithm import StepContext
from training.choices.fedavg import FedAvgConfig, RotationHeadConfig
from training.local.data import Examples, slices_of
from training.local.loop import Penalty
from training.local.norms import held_statistics
from training.local.site import SiteData
from training.parts.part import Part


class RotationHead(Part):
    """A term of every batch's loss, of a run that trains the head."""

    def __init__(self, config: FedAvgConfig) -> None:
        self.config = config

    @override
    def term(self, context: StepContext, network: nn.Module, data: SiteData) -> Penalty | None:
        """The loss of the head, at a site; None without one."""
        config = self.config
        if not isinstance(config, RotationHeadConfig) or not config.rotation_head:
            return None
        draw = context.generator("rotation")
        # No network of volumes has the head.
        return rotation_term(network, slices_of(data.train), config.batch_size, config.precision, draw)


def rotation_term(
    network: nn.Module, data: Examples, batch_size: int, precision: Precision, generator: torch.Generator
) -> Penalty:
    """The cross-entropy of the turns of `batch_size` images, drawn with replacement at every call.

    Batch norm's running statistics stay those of images that are not turned. Raises NetworkError for a
    network without the head.
    """
    head = required_turns(network, "rotation_head")
    device = next(network.parameters()).device

    def term() -> Tensor:
        chosen = torch.randint(len(data), (batch_size,), generator=generator).numpy()
        images = sent(torch.from_numpy(data.images[chosen]), device)
        with mixed_precision(precision, device), held_statistics(network, randomised=True):
            return rotation_loss(head, images, generator)

    return term


def together(*penalties: Penalty | None) -> Penalty | None:
    """The sum of the penalties that there are; None without any."""
    found = [penalty for penalty in penalties if penalty is not None]
    if len(found) < 2:
        return found[0] if found else None

    def total() -> Tensor:
        return torch.stack([penalty() for penalty in found]).sum()

    return total
