"""The plain U-Net of IOP-FL (Jiang et al., TMI 2023).

Parameter names are those of the authors' public checkpoints, so that their weights can be loaded. Their
unused self-supervision head (`bn`, `fc`: 3,076 parameters) is left out; `rotation_head` is a used one.

Legend: B batch, C channels, K classes, H and W height and width (multiples of 16).
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.networks.backbone import Backbone
from personalization.networks.capabilities import BatchNorm, Traits, TransposedConvolution, spatial_axes
from personalization.networks.registry import check_arguments
from personalization.networks.rotation import RotationHead, required_turns

DEPTH = 4


class UNet(Backbone):
    """U-Net with batch normalisation: four poolings, `width` channels at full resolution, 16x at the bottom.

    `width=32` is the paper's (7,763,074 parameters for 3 channels and 2 classes). With `rotation_head` it can
    tell the quarter `turns` of images, for test-time training.
    """

    traits = Traits(
        "segmentation",
        head=(*(f"{part}{level}" for level in range(DEPTH, 0, -1) for part in ("upconv", "decoder")), "conv"),
        # Each of the four poolings halves the sides exactly once.
        multiples=2**DEPTH,
    )
    centred_queries = True

    def __init__(
        self, in_channels: int, classes: int, width: int = 32, *, rotation_head: bool = False
    ) -> None:
        super().__init__()
        check_arguments("unet", in_channels, classes, width)
        self.in_channels = in_channels
        self.classes = classes
        self.width = width
        widths = [width * 2**level for level in range(DEPTH + 1)]
        previous = in_channels
        for level in range(1, DEPTH + 1):
            self.add_module(f"encoder{level}", block(previous, widths[level - 1], f"enc{level}"))
            previous = widths[level - 1]
        self.pool = nn.MaxPool2d(2)
        self.bottleneck = block(previous, widths[DEPTH], "bottleneck")
        for level in range(DEPTH, 0, -1):
            above, here = widths[level], widths[level - 1]
            self.add_module(f"upconv{level}", nn.ConvTranspose2d(above, here, kernel_size=2, stride=2))
            self.add_module(f"decoder{level}", block(2 * here, here, f"dec{level}"))
        self.conv = nn.Conv2d(width, classes, kernel_size=1)
        self.rotation = RotationHead(widths[DEPTH]) if rotation_head else None

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Compute logits [B, K, H, W] of images [B, C, H, W].

        Raises NetworkError for a wrong channel count or sides that are not multiples of 16.
        """
        logits: Tensor = self.conv(self.features(image_BCHW))
        return logits

    @override
    def features(self, image_BCHW: Tensor) -> Tensor:
        """Compute the input [B, width, H, W] of the last convolution. Raises as `forward`."""
        skips, features = self._encode(image_BCHW)
        for level in range(DEPTH, 0, -1):
            features = self.get_submodule(f"upconv{level}")(features)
            features = torch.cat((features, skips.pop()), dim=1)
            features = self.get_submodule(f"decoder{level}")(features)
        return features

    def turns(self, image_BCHW: Tensor) -> Tensor:
        """Compute logits [B, 4] of the quarter turn of images. Raises as `forward`, and without the head."""
        required_turns(self, "turns")
        assert self.rotation is not None
        logits: Tensor = self.rotation(self._encode(image_BCHW)[1])
        return logits

    @override
    def query(self, image_BCHW: Tensor) -> Tensor:
        """Compute the bottleneck's features averaged over the image, [B, 16 width]. Raises as `forward`."""
        features = self._encode(image_BCHW)[1]
        return features.mean(dim=spatial_axes(features))

    @property
    @override
    def query_width(self) -> int:
        return int(self.width * 2**DEPTH)

    @property
    @override
    def ssf_paths(self) -> tuple[str, ...]:
        """Batch norms and up-convolutions. Scales and shifts before a batch norm would be normalised away."""
        return tuple(
            path
            for path, module in self.named_modules()
            if isinstance(module, BatchNorm | TransposedConvolution)
        )

    def _encode(self, image: Tensor) -> tuple[list[Tensor], Tensor]:
        """Compute the skip connections and the bottleneck's features."""
        self.traits.check_images(image, self.in_channels, "unet")
        skips: list[Tensor] = []
        features = image
        for level in range(1, DEPTH + 1):
            features = self.get_submodule(f"encoder{level}")(features)
            skips.append(features)
            features = self.pool(features)
        return skips, self.bottleneck(features)


def block(channels: int, features: int, name: str) -> nn.Sequential:
    """Build (3x3 convolution without bias, batch norm, ReLU) twice."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, source in ((1, channels), (2, features)):
        layers[f"{name}_conv{number}"] = nn.Conv2d(source, features, kernel_size=3, padding=1, bias=False)
        layers[f"{name}_bn{number}"] = nn.BatchNorm2d(features)
        layers[f"{name}_relu{number}"] = nn.ReLU(inplace=True)
    return nn.Sequential(layers)
