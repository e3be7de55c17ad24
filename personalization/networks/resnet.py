"""The ResNet-18 of FedISCA and FedBiCross, for small images: a 3x3 stem without pooling.

He et al., Deep Residual Learning for Image Recognition, 2016, in the variant for CIFAR. For 28 x 28 images
the last map is 4 x 4. Pooling is global, so images of any size fit.

Legend: B batch, C channels, K classes, H and W height and width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from personalization.networks.capabilities import Traits
from personalization.networks.registry import check_arguments

BLOCKS = (2, 2, 2, 2)
# With fewer channels, oneDNN's gradient of a strided 1x1 convolution writes out of bounds on processors with
# AVX2 but without AVX-512 (github.com/uxlfoundation/oneDNN/issues/6035).
_SAFE_CHANNELS = 8


class ResNet18(nn.Module):
    """ResNet-18 with `width` channels at full resolution, 8x at the bottom.

    `width=64` is the paper's (11,173,962 parameters for 3 channels and 10 classes).
    """

    # With a smaller side, nothing remains to pool after three halvings.
    traits = Traits("classification", head=("linear",), least_side=8)

    def __init__(self, in_channels: int, classes: int, width: int = 64) -> None:
        super().__init__()
        check_arguments("resnet18", in_channels, classes, width)
        self.in_channels = in_channels
        self.conv1 = nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        previous = width
        for level, count in enumerate(BLOCKS):
            features = width * 2**level
            strides = [1 if level == 0 else 2] + [1] * (count - 1)
            blocks = [
                _Block(previous if number == 0 else features, features, stride)
                for number, stride in enumerate(strides)
            ]
            self.add_module(f"layer{level + 1}", nn.Sequential(*blocks))
            previous = features
        self.linear = nn.Linear(previous, classes)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Compute logits [B, K] of images [B, C, H, W].

        Raises NetworkError for a wrong channel count or a side below 8.
        """
        self.traits.check_images(image_BCHW, self.in_channels, "resnet18")
        features = torch.relu(self.bn1(self.conv1(image_BCHW)))
        for level in range(len(BLOCKS)):
            features = self.get_submodule(f"layer{level + 1}")(features)
        logits: Tensor = self.linear(features.mean(dim=(2, 3)))
        return logits


class _Every(nn.Conv2d):
    """A strided 1x1 convolution that first selects every `stride`-th pixel, with the same result."""

    def forward(self, features_BCHW: Tensor) -> Tensor:
        rows, columns = self.stride
        return functional.conv2d(features_BCHW[:, :, ::rows, ::columns], self.weight)


class _Block(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut."""

    def __init__(self, channels: int, features: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, features, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(features)
        self.conv2 = nn.Conv2d(features, features, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(features)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != features:
            kind = nn.Conv2d if channels >= _SAFE_CHANNELS else _Every
            self.shortcut = nn.Sequential(
                kind(channels, features, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(features),
            )

    def forward(self, features_BCHW: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(features_BCHW)))
        return torch.relu(self.bn2(self.conv2(inner)) + self.shortcut(features_BCHW))
