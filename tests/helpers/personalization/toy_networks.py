"""A toy U-Net of one to three dimensions, with batch norm or instance norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from personalization.networks import initialise
from personalization.networks.capabilities import Traits

CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORMS: dict[int, Any] = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


class ToyNet(nn.Module):
    """Down by a strided convolution, convolution with norm, up by a transposed one, and the output."""

    def __init__(
        self, in_channels: int, classes: int, width: int = 4, dimensions: int = 3, norm: str = "batch"
    ) -> None:
        super().__init__()
        self.traits = Traits("segmentation", head=("up", "output"), dimensions=dimensions, multiples=2)
        self.in_channels = in_channels
        normalise = (
            BATCH_NORMS[dimensions](width)
            if norm == "batch"
            else INSTANCE_NORMS[dimensions](width, affine=True)
        )
        self.down = CONVOLUTIONS[dimensions](in_channels, width, 2, stride=2)
        self.body = nn.Sequential(CONVOLUTIONS[dimensions](width, width, 3, padding=1), normalise, nn.ReLU())
        self.up = TRANSPOSED[dimensions](width, width, 2, stride=2)
        self.output = CONVOLUTIONS[dimensions](width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        self.traits.check_images(images, self.in_channels, "toy")
        logits: Tensor = self.output(self.up(self.body(self.down(images))))
        return logits


def toy(dimensions: int, seed: int = 0, **arguments: Any) -> ToyNet:
    """With weights, and running statistics, drawn from the seed."""
    draw = torch.Generator().manual_seed(seed)
    network = ToyNet(1, 2, dimensions=dimensions, **arguments)
    initialise(network, draw)
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.2, generator=draw)
            module.running_var.uniform_(0.5, 1.5, generator=draw)
            module.weight.data.uniform_(0.5, 1.5, generator=draw)
            module.bias.data.normal_(0, 0.2, generator=draw)
    return network.eval()
