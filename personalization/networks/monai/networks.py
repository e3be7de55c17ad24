"""Networks of MONAI by an allow-list, in two and three dimensions.

`network: monai.dynunet` with plain, bounded arguments: MONAI's own names and defaults, but `classes` for
`out_channels`, a `width` where MONAI asks for a list of channels, and norms and activations of short lists.
Left out is what a federation could not repeat or serve: dropout and stochastic depth, which draw from
torch's global generator; deep supervision; pretrained weights, which are downloaded.

MONAI takes seconds to import, so that only the registry imports this module, when it first builds one.

Legend: B batch, C channels, K classes, ... two or three spatial axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from monai.networks import nets
from monai.networks.nets.attentionunet import AttentionLayer
from torch import Tensor, nn
from typing_extensions import override

from personalization.networks.capabilities import Traits
from personalization.networks.instance_norm import track
from personalization.networks.monai.arguments import (
    MOST_BLOCKS,
    MOST_CHANNELS,
    MOST_KERNEL,
    MOST_STAGES,
    MOST_STRIDE,
    Arguments,
    Layer,
    PerAxis,
)

# nnU-Net's bound on what doubling gives, by the number of spatial axes.
MOST_DOUBLED = {2: 512, 3: 320}
_UPSAMPLING = ("deconv", "nontrainable", "pixelshuffle")
_BACKBONES = ("resnet10", "resnet18", "resnet34", "resnet50")


class Segmenting(nn.Module):
    """What all of them share: the traits, and an input that is checked before torch sees it."""

    NAME: str
    traits: Traits
    in_channels: int

    def __init__(self, **arguments: Any) -> None:
        """`arguments` are those of MONAI's constructor, which a bundle writes down."""
        super().__init__(**arguments)
        self.monai_arguments = arguments

    @override
    def forward(self, image_BC: Tensor) -> Tensor:
        """Logits [B, K, ...] of images [B, C, ...]. Raises NetworkError for images that do not fit."""
        self.traits.check_images(image_BC, self.in_channels, self.NAME)
        logits: Tensor = super().forward(image_BC)
        return logits

    def _declare(self, ask: Arguments, head: Sequence[str], *strides: PerAxis) -> None:
        """Declare the traits: the head, and sides that all the strides divide."""
        if ask.tracks:
            track(self)
        self.in_channels = ask.in_channels
        each = tuple(math.prod(axis) for axis in zip(*(ask.each_axis(by) for by in strides), strict=True))
        # An instance norm needs two values at the bottom to have a variance.
        self.traits = Traits(
            "segmentation", tuple(head), ask.dims, multiples=each, least_pixels=2 * math.prod(each)
        )


class DynUNet(Segmenting, nets.DynUNet):  # type: ignore[misc]  # without types
    """nnU-Net's U-Net (Isensee et al., 2021), of any kernels and strides.

    nnU-Net's PlainConvUNet with instance norm is one with `trans_bias`. `filters` take the place of `width`,
    which doubles by stage up to nnU-Net's 512 or 320. The first stride belongs to the input block.
    """

    NAME = "monai.dynunet"
    input_block: nn.Module
    downsamples: nn.ModuleList
    bottleneck: nn.Module
    upsamples: nn.ModuleList
    output_block: nn.Module

    def __init__(
        self,
        in_channels: int,
        classes: int,
        spatial_dims: int = 3,
        width: int = 16,
        filters: Sequence[int] | None = None,
        kernel_size: Sequence[PerAxis] | None = None,
        strides: Sequence[PerAxis] = (1, 2, 2, 2),
        upsample_kernel_size: Sequence[PerAxis] | None = None,
        norm_name: Layer = "instance",
        act_name: Layer = "leakyrelu",
        res_block: bool = False,
        trans_bias: bool = False,
    ) -> None:
        ask = Arguments(self.NAME, spatial_dims, in_channels, classes, width)
        strides = ask.per_stage("strides", strides, MOST_STRIDE, least=3)
        count = len(strides)
        if filters is None:
            filters = [min(width * 2**stage, MOST_DOUBLED[spatial_dims]) for stage in range(count)]
        filters = ask.numbers("filters", filters, MOST_CHANNELS, count, count)
        kernels = ask.per_stage("kernel_size", kernel_size or [3] * count, MOST_KERNEL, count, count)
        ups = ask.per_stage(
            "upsample_kernel_size", upsample_kernel_size or strides[1:], MOST_STRIDE, count - 1, count - 1
        )
        if any(ask.each_axis(stride) != (1,) * spatial_dims for stride in strides[:1]):
            ask.refuse("strides", "1 first, so that masks have the sides of the image", strides[0])
        if ups != strides[1:]:
            ask.refuse("upsample_kernel_size", f"the strides after the first, {strides[1:]}", ups)
        super().__init__(
            spatial_dims=spatial_dims,
            in_channels=in_channels,
            out_channels=classes,
            kernel_size=kernels,
            strides=strides,
            upsample_kernel_size=ups,
            filters=filters,
            norm_name=ask.norm("norm_name", norm_name, filters),
            act_name=ask.activation("act_name", act_name),
            res_block=res_block,
            trans_bias=trans_bias,
        )
        # MONAI registers every block a second time in there, under another name. A layer that is replaced,
        # or kept by a site, by one of its names would stay as it was under the other.
        del self.skip_layers
        head = (*(f"upsamples.{index}" for index in range(count - 1)), "output_block")
        self._declare(ask, head, *strides)

    @override
    def forward(self, image_BC: Tensor) -> Tensor:
        """Compute what MONAI's recursion does, level by level."""
        self.traits.check_images(image_BC, self.in_channels, self.NAME)
        skips = [self.input_block(image_BC)]
        for down in self.downsamples:
            skips.append(down(skips[-1]))
        features = self.bottleneck(skips[-1])
        for up in self.upsamples:
            features = up(features, skips.pop())
        logits: Tensor = self.output_block(features)
        return logits


class SegResNet(Segmenting, nets.SegResNet):  # type: ignore[misc]  # without types
    """The residual network of Myronenko (BraTS 2018), without its autoencoder."""

    NAME = "monai.segresnet"

    def __init__(
        self,
        in_channels: int,
        classes: int,
        spatial_dims: int = 3,
        width: int = 16,
        blocks_down: Sequence[int] = (1, 2, 2, 4),
        blocks_up: Sequence[int] = (1, 1, 1),
        norm: Layer = "group",
        act: Layer = "relu",
        upsample_mode: str = "nontrainable",
    ) -> None:
        ask = Arguments(self.NAME, spatial_dims, in_channels, classes, width)
        down = ask.numbers("blocks_down", blocks_down, MOST_BLOCKS, 2, MOST_STAGES)
        up = ask.numbers("blocks_up", blocks_up, MOST_BLOCKS, len(down) - 1, len(down) - 1)
        super().__init__(
            spatial_dims=spatial_dims,
            init_filters=width,
            in_channels=in_channels,
            out_channels=classes,
            blocks_down=tuple(down),
            blocks_up=tuple(up),
            norm=ask.norm("norm", norm, [width]),
            act=ask.activation("act", act),
            upsample_mode=ask.one_of("upsample_mode", upsample_mode, _UPSAMPLING),
        )
        head = [f"up_{part}.{index}" for index in range(len(up)) for part in ("samples", "layers")]
        self._declare(ask, (*head, "conv_final"), 2 ** (len(down) - 1))


class BasicUNet(Segmenting, nets.BasicUNet):  # type: ignore[misc]  # without types
    """A U-Net of four poolings (Falk et al., 2019). `features` take the place of `width`."""

    NAME = "monai.basicunet"

    def __init__(
        self,
        in_channels: int,
        classes: int,
        spatial_dims: int = 3,
        width: int = 16,
        features: Sequence[int] | None = None,
        norm: Layer = "instance",
        act: Layer = ("leakyrelu", {"negative_slope": 0.1}),
        bias: bool = True,
        upsample: str = "deconv",
    ) -> None:
        ask = Arguments(self.NAME, spatial_dims, in_channels, classes, width)
        if features is None:
            features = [width, width, 2 * width, 4 * width, 8 * width, width]
        features = ask.numbers("features", features, MOST_CHANNELS, 6, 6)
        super().__init__(
            spatial_dims=spatial_dims,
            in_channels=in_channels,
            out_channels=classes,
            features=features,
            norm=ask.norm("norm", norm, features),
            act=ask.activation("act", act),
            bias=bias,
            upsample=ask.one_of("upsample", upsample, _UPSAMPLING),
        )
        head = (*(f"upcat_{level}" for level in (4, 3, 2, 1)), "final_conv")
        self._declare(ask, head, 16)


class UNet(Segmenting, nets.UNet):  # type: ignore[misc]  # without types
    """The U-Net with strided convolutions, and residual units if asked (Kerfoot et al., 2018)."""

    NAME = "monai.unet"

    def __init__(
        self,
        in_channels: int,
        classes: int,
        spatial_dims: int = 3,
        width: int = 16,
        channels: Sequence[int] | None = None,
        strides: Sequence[PerAxis] = (2, 2, 2),
        kernel_size: PerAxis = 3,
        up_kernel_size: PerAxis = 3,
        num_res_units: int = 2,
        norm: Layer = "instance",
        act: Layer = "prelu",
        bias: bool = True,
    ) -> None:
        ask = Arguments(self.NAME, spatial_dims, in_channels, classes, width)
        channels, strides = ask.channels(channels, width, strides)
        super().__init__(
            spatial_dims=spatial_dims,
            in_channels=in_channels,
            out_channels=classes,
            channels=channels,
            strides=strides,
            kernel_size=ask.per_axis("kernel_size", kernel_size, MOST_KERNEL),
            up_kernel_size=ask.per_axis("up_kernel_size", up_kernel_size, MOST_KERNEL),
            num_res_units=ask.whole("num_res_units", num_res_units, 0, MOST_BLOCKS),
            norm=ask.norm("norm", norm, [*channels, classes]),
            act=ask.activation("act", act),
            bias=bias,
        )
        ups = ["model" + ".1.submodule" * level + ".2" for level in range(len(strides))]
        self._declare(ask, ups[::-1], *strides)


class AttentionUnet(Segmenting, nets.AttentionUnet):  # type: ignore[misc]  # without types
    """The U-Net with attention gates (Oktay et al., 2018), with batch norm."""

    NAME = "monai.attentionunet"

    def __init__(
        self,
        in_channels: int,
        classes: int,
        spatial_dims: int = 3,
        width: int = 16,
        channels: Sequence[int] | None = None,
        strides: Sequence[PerAxis] = (2, 2, 2),
        kernel_size: PerAxis = 3,
        up_kernel_size: PerAxis = 3,
    ) -> None:
        ask = Arguments(self.NAME, spatial_dims, in_channels, classes, width)
        channels, strides = ask.channels(channels, width, strides)
        if any(count < 2 for count in channels):
            ask.refuse("channels", "at least 2 per stage, of which a gate takes half", channels)
        super().__init__(
            spatial_dims=spatial_dims,
            in_channels=in_channels,
            out_channels=classes,
            channels=channels,
            strides=strides,
            kernel_size=ask.per_axis("kernel_size", kernel_size, MOST_KERNEL),
            up_kernel_size=ask.per_axis("up_kernel_size", up_kernel_size, MOST_KERNEL),
        )
        layers = {path: each for path, each in self.named_modules() if isinstance(each, AttentionLayer)}
        for layer in layers.values():
            _in_order(layer, ("submodule", "upconv", "attention", "merge"))
        head = [f"{path}.{part}" for path in [*layers][::-1] for part in ("upconv", "attention", "merge")]
        self._declare(ask, (*head, "model.2"), *strides)


class MedNeXt(Segmenting, nets.MedNeXt):  # type: ignore[misc]  # without types
    """The ConvNeXt U-Net (Roy et al., MICCAI 2023), with group norm of one channel each."""

    NAME = "monai.mednext"

    def __init__(
        self,
        in_channels: int,
        classes: int,
        spatial_dims: int = 3,
        width: int = 16,
        encoder_expansion_ratio: int | Sequence[int] = 2,
        decoder_expansion_ratio: int | Sequence[int] = 2,
        bottleneck_expansion_ratio: int = 2,
        kernel_size: int = 3,
        use_residual_connection: bool = True,
        blocks_down: Sequence[int] = (2, 2, 2),
        blocks_bottleneck: int = 2,
        blocks_up: Sequence[int] = (2, 2, 2),
    ) -> None:
        ask = Arguments(self.NAME, spatial_dims, in_channels, classes, width)
        down = ask.numbers("blocks_down", blocks_down, MOST_BLOCKS, 1, MOST_STAGES)
        up = ask.numbers("blocks_up", blocks_up, MOST_BLOCKS, len(down), len(down))
        if kernel_size % 2 == 0:
            ask.refuse("kernel_size", "an odd number", kernel_size)

        def ratios(name: str, value: int | Sequence[int]) -> list[int]:
            each = [value] * len(down) if isinstance(value, int) else value
            return ask.numbers(name, each, MOST_BLOCKS, len(down), len(down))

        super().__init__(
            spatial_dims=spatial_dims,
            init_filters=width,
            in_channels=in_channels,
            out_channels=classes,
            encoder_expansion_ratio=ratios("encoder_expansion_ratio", encoder_expansion_ratio),
            decoder_expansion_ratio=ratios("decoder_expansion_ratio", decoder_expansion_ratio),
            bottleneck_expansion_ratio=ratios("bottleneck_expansion_ratio", bottleneck_expansion_ratio)[0],
            kernel_size=ask.whole("kernel_size", kernel_size, 1, MOST_KERNEL),
            use_residual_connection=use_residual_connection,
            blocks_down=down,
            blocks_bottleneck=ask.whole("blocks_bottleneck", blocks_bottleneck, 1, MOST_BLOCKS),
            blocks_up=up,
        )
        head = [f"{part}.{index}" for index in range(len(up)) for part in ("up_blocks", "dec_stages")]
        self._declare(ask, (*head, "out_0"), 2 ** len(down))


class FlexibleUNet(Segmenting, nets.FlexibleUNet):  # type: ignore[misc]  # without types
    """A U-Net on a ResNet's stages. EfficientNet is no choice: it drops blocks at random in training."""

    NAME = "monai.flexibleunet"

    def __init__(
        self,
        in_channels: int,
        classes: int,
        spatial_dims: int = 3,
        backbone: str = "resnet18",
        decoder_channels: Sequence[int] = (256, 128, 64, 32, 16),
        norm: Layer = ("batch", {"eps": 1e-3}),
        act: Layer = "relu",
        decoder_bias: bool = False,
        upsample: str = "nontrainable",
    ) -> None:
        ask = Arguments(self.NAME, spatial_dims, in_channels, classes)
        channels = ask.numbers("decoder_channels", decoder_channels, MOST_CHANNELS, 5, 5)
        super().__init__(
            in_channels=in_channels,
            out_channels=classes,
            backbone=ask.one_of("backbone", backbone, _BACKBONES),
            pretrained=False,
            decoder_channels=tuple(channels),
            spatial_dims=spatial_dims,
            norm=ask.norm("norm", norm, channels),
            act=ask.activation("act", act),
            decoder_bias=decoder_bias,
            upsample=ask.one_of("upsample", upsample, _UPSAMPLING),
        )
        self._declare(ask, ("decoder", "segmentation_head"), 32)


def _in_order(module: nn.Module, names: Sequence[str]) -> None:
    """Register children again, in the order in which they run: recipes go from the image to the mask."""
    for name in names:
        child = getattr(module, name)
        delattr(module, name)
        setattr(module, name, child)


CLASSES: Mapping[str, type[Segmenting]] = {
    "DynUNet": DynUNet,
    "SegResNet": SegResNet,
    "BasicUNet": BasicUNet,
    "UNet": UNet,
    "AttentionUnet": AttentionUnet,
    "MedNeXt": MedNeXt,
    "FlexibleUNet": FlexibleUNet,
}
"""MONAI's name of a class -> ours."""
