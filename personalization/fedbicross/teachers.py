"""Stage 2b: a cluster's models as one teacher, F, and a copy adapted to the images' noise, F~.

Legend: B batch, C channels, K classes, H and W height and width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from personalization.networks.capabilities import batch_norms
from personalization.precision import to_float32
from personalization.state import State

MOMENTUM = 0.1


class Teacher:
    """F, the mean of the members' logits, and F~, the same weights with separate running statistics.

    The statistics of F~ follow the images (mu <- 0.9 mu + 0.1 mu(x), the variance likewise). FedISCA's code
    adapts them too, but answers with the batch's statistics (`of_batch`), so that the running ones have no
    effect; the paper uses the running ones.
    """

    def __init__(self, members: Sequence[nn.Module], of_batch: bool = False) -> None:
        self.members = tuple(members)
        self._of_batch = of_batch
        for member in self.members:
            member.eval().requires_grad_(False)
        self.adapted = tuple(_with_own_buffers(member) for member in self.members)

    @torch.no_grad()
    def adapt(self, images_BCHW: Tensor) -> None:
        """Update F~'s running statistics with the images, by a pass in training mode."""
        for network in self.adapted:
            network.train()
            network(images_BCHW)
            network.eval()

    @torch.no_grad()
    def logits(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the logits of F and F~, [B, K] each, with running statistics, or F~'s with the batch's."""
        plain = _mean_logits(self.members, images_BCHW)
        if not self._of_batch:
            return plain, _mean_logits(self.adapted, images_BCHW)
        kept = self.buffers()
        for network in self.adapted:
            network.train()
        answers = _mean_logits(self.adapted, images_BCHW)
        for network in self.adapted:
            network.eval()
        self.restore(kept)
        return plain, answers

    def buffers(self) -> list[State]:
        """Copy the statistics of F~, one state per member. A checkpoint of F~ needs nothing else."""
        return [
            {name: buffer.detach().cpu().clone() for name, buffer in network.named_buffers()}
            for network in self.adapted
        ]

    def restore(self, buffers: Sequence[State]) -> None:
        """Restore the statistics that `buffers` returned."""
        for network, state in zip(self.adapted, buffers, strict=True):
            for name, buffer in network.named_buffers():
                buffer.copy_(state[name])


def _with_own_buffers(network: nn.Module) -> nn.Module:
    """Copy a network but share its parameters, so that only the running statistics need more memory."""
    shared = {id(parameter): parameter for parameter in network.parameters()}
    twin: nn.Module = copy.deepcopy(network, shared)
    for norm in batch_norms(twin).values():
        norm.momentum = MOMENTUM
    return twin


def _mean_logits(networks: Sequence[nn.Module], images_BCHW: Tensor) -> Tensor:
    return torch.stack([to_float32(network(images_BCHW)) for network in networks]).mean(dim=0)
