"""A U-Net with EfficientNet-Lite0 for its encoder: Tan & Le, EfficientNet, 2019, as made for small devices.

This variant has batch norm and ReLU6, and no squeeze-and-excitation, so that recipes that move batch norm
work, and it exports to plain operators. Published weights of a classifier fit the encoder
(`encoder_from_published`); the decoder is the plain U-Net's. Convolutions with stride 2 are padded as
TensorFlow pads, more at the bottom and right, since the weights were trained so.

Legend: B batch, C channels, K classes, H and W height and width (multiples of 32).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from typing_extensions import override

from personalization.errors import NetworkError
from personalization.networks.backbone import Backbone
from personalization.networks.capabilities import BatchNorm, Traits, TransposedConvolution, spatial_axes
from personalization.networks.registry import check_arguments
from personalization.networks.unet import block
from personalization.state import State

_EPS = 1e-3
_STEM = 32
# Repeats, kernel, stride of the first, expansion, channels.
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
# Blocks with outputs that the decoder takes, the last of each resolution, and their channels.
_TAKEN = {0: 16, 2: 24, 4: 40, 10: 112, 15: 320}
_LEVELS = len(_TAKEN)
_RGB = 3


class EfficientNetUNet(Backbone):
    """EfficientNet-Lite0 and a decoder of `width` channels at full resolution, 8 times that at the bottom."""

    traits = Traits(
        "segmentation",
        head=(
            *(f"{part}{level}" for level in range(_LEVELS, 0, -1) for part in ("upconv", "decoder")),
            "conv",
        ),
        multiples=2**_LEVELS,
    )
    centred_queries = True

    def __init__(self, in_channels: int, classes: int, width: int = 16) -> None:
        super().__init__()
        check_arguments("efficientnet_unet", in_channels, classes, width)
        self.in_channels = in_channels
        self.classes = classes
        self.encoder = _Encoder(in_channels)
        widths = [width, width, *(width * 2**level for level in range(1, _LEVELS - 1))]
        skips = [0, *_TAKEN.values()]
        above = skips[-1]
        for level in range(_LEVELS, 0, -1):
            here = widths[level - 1]
            self.add_module(f"upconv{level}", nn.ConvTranspose2d(above, here, kernel_size=2, stride=2))
            self.add_module(f"decoder{level}", block(here + skips[level - 1], here, f"dec{level}"))
            above = here
        self.conv = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Compute logits [B, K, H, W] of images [B, C, H, W].

        Raises NetworkError for a wrong channel count or sides that are not multiples of 32.
        """
        logits: Tensor = self.conv(self.features(image_BCHW))
        return logits

    @override
    def features(self, image_BCHW: Tensor) -> Tensor:
        """Compute the input [B, width, H, W] of the last convolution. Raises as `forward`."""
        self.traits.check_images(image_BCHW, self.in_channels, "efficientnet_unet")
        *skips, features = self.encoder(image_BCHW)
        for level in range(_LEVELS, 0, -1):
            features = self.get_submodule(f"upconv{level}")(features)
            if skips:
                features = torch.cat((features, skips.pop()), dim=1)
            features = self.get_submodule(f"decoder{level}")(features)
        out: Tensor = features
        return out

    @override
    def query(self, image_BCHW: Tensor) -> Tensor:
        """Compute the encoder's last features averaged over the image, [B, 320]. Raises as `forward`."""
        self.traits.check_images(image_BCHW, self.in_channels, "efficientnet_unet")
        features: Tensor = self.encoder(image_BCHW)[-1]
        return features.mean(dim=spatial_axes(features))

    @property
    @override
    def query_width(self) -> int:
        return _STAGES[-1][-1]

    @property
    @override
    def ssf_paths(self) -> tuple[str, ...]:
        """Batch norms and up-convolutions, as of the U-Net."""
        return tuple(
            path
            for path, module in self.named_modules()
            if isinstance(module, BatchNorm | TransposedConvolution)
        )


class _Encoder(nn.Module):
    """The classifier without its last convolution and head."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.stem = _Convolution(in_channels, _STEM, 3, 2)
        blocks: list[nn.Module] = []
        above = _STEM
        for repeats, kernel, stride, expansion, channels in _STAGES:
            for index in range(repeats):
                blocks.append(_Block(above, channels, kernel, stride if index == 0 else 1, expansion))
                above = channels
        self.blocks = nn.ModuleList(blocks)

    def forward(self, image: Tensor) -> list[Tensor]:
        """Features at a half, a quarter, ... of the image's sides."""
        features, taken = self.stem(image), []
        for index, module in enumerate(self.blocks):
            features = module(features)
            if index in _TAKEN:
                taken.append(features)
        return taken


class _Convolution(nn.Module):
    """Convolution, batch norm and, if `active`, ReLU6."""

    def __init__(
        self, above: int, here: int, kernel: int, stride: int = 1, groups: int = 1, *, active: bool = True
    ) -> None:
        super().__init__()
        # Of even sides. TensorFlow pads a convolution of stride 2 by one pixel less than kernel - 1.
        total = kernel - stride
        self.padding = (total // 2, total - total // 2) * 2
        self.conv = nn.Conv2d(above, here, kernel, stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(here, eps=_EPS)
        self.active = nn.ReLU6() if active else nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        padded = pad(features, self.padding) if any(self.padding) else features
        out: Tensor = self.active(self.norm(self.conv(padded)))
        return out


class _Block(nn.Module):
    """Inverted residual: expand, filter each channel, project."""

    def __init__(self, above: int, here: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = above * expansion
        self.expand = _Convolution(above, inner, 1) if expansion > 1 else nn.Identity()
        self.depthwise = _Convolution(inner, inner, kernel, stride, groups=inner)
        self.project = _Convolution(inner, here, 1, active=False)
        self.shortcut = stride == 1 and above == here

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.project(self.depthwise(self.expand(features)))
        return features + out if self.shortcut else out


def is_efficientnet(published: Mapping[str, Tensor]) -> bool:
    """Whether these are tensors of a published EfficientNet, by their names."""
    return "_conv_stem.weight" in published


_NORMS = {"expand": "_bn0", "depthwise": "_bn1", "project": "_bn2"}


def encoder_from_published(published: Mapping[str, Tensor], in_channels: int, where: str) -> State:
    """The tensors of a published EfficientNet-Lite0 under the names of `EfficientNetUNet`.

    The last convolution and the classifier are left out. For images of one channel the kernels of the
    colours are summed, which is equivalent to repeating the channel three times. Raises NetworkError for
    another number of channels; other tensors keep their names, for the caller to refuse.
    """
    renamed = {"_conv_stem": "encoder.stem.conv", "_bn0": "encoder.stem.norm"}
    for index in range(sum(repeats for repeats, *_ in _STAGES)):
        for part, norm in _NORMS.items():
            source, target = f"_blocks.{index}", f"encoder.blocks.{index}.{part}"
            renamed |= {f"{source}._{part}_conv": f"{target}.conv", f"{source}.{norm}": f"{target}.norm"}
    state: State = {}
    for name, tensor in published.items():
        layer, _, kind = name.rpartition(".")
        if layer not in ("_conv_head", "_bn1", "_fc"):
            state[f"{renamed.get(layer, layer)}.{kind}"] = tensor
    kernel = state["encoder.stem.conv.weight"]
    if kernel.shape[1] != in_channels:
        if kernel.shape[1] != _RGB or in_channels != 1:
            raise NetworkError(
                f"{where}: expected {in_channels} input channels as the task has, found {kernel.shape[1]}"
            )
        state["encoder.stem.conv.weight"] = kernel.sum(1, keepdim=True)
    return state
