"""Make folders as nnU-Net v2 writes them, with random weights and without nnU-Net."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

KERNELS = [[1, 3, 3], [3, 3, 3], [3, 3, 3]]
STRIDES = [[1, 1, 1], [1, 2, 2], [2, 2, 2]]
FEATURES = [4, 8, 16]
BLOCKS = [1, 3, 2]
_CONVOLUTIONS: Any = {2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED: Any = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_NORMS: Any = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
_POOLS: Any = {2: nn.AvgPool2d, 3: nn.AvgPool3d}


class _UNet(nn.Module):
    """nnU-Net's networks by the names of their parameters, without those that name the same tensor again.

    dynamic_network_architectures 0.4.4: convolutions, instance norms and LeakyReLU; a transposed convolution
    with the stride as its kernel leads up. Sides of two axes are those of slices.
    """

    def __init__(self, in_channels: int, classes: int, kernels: Any, strides: Any, convolutions: int) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.stages = self._stages(in_channels, kernels, strides)
        self.decoder = nn.Module()
        levels = range(len(FEATURES) - 2, -1, -1)
        axes = len(kernels[0])
        self.decoder.transpconvs = nn.ModuleList(
            _TRANSPOSED[axes](FEATURES[level + 1], FEATURES[level], *(tuple(strides[level + 1]),) * 2)
            for level in levels
        )
        self.decoder.stages = nn.ModuleList(
            _block(2 * FEATURES[level], FEATURES[level], kernels[level], [1] * axes, convolutions)
            for level in levels
        )
        self.decoder.seg_layers = nn.ModuleList(
            _CONVOLUTIONS[axes](FEATURES[level], classes, 1) for level in levels
        )

    def _stages(self, in_channels: int, kernels: Any, strides: Any) -> nn.Sequential:
        raise NotImplementedError

    def _encoded(self, image: Tensor) -> list[Tensor]:
        raise NotImplementedError

    @override
    def forward(self, image: Tensor) -> Tensor:
        decoder: Any = self.decoder
        skips = self._encoded(image)
        found = skips.pop()
        for up, stage in zip(decoder.transpconvs, decoder.stages, strict=True):
            found = _run(stage, torch.cat((up(found), skips.pop()), 1))
        logits: Tensor = decoder.seg_layers[-1](found)
        return logits


class PlainConvUNet(_UNet):
    """Two convolutions per stage, of which the first has its stride."""

    def __init__(
        self, in_channels: int, classes: int, kernels: Any = KERNELS, strides: Any = STRIDES
    ) -> None:
        super().__init__(in_channels, classes, kernels, strides, 2)

    @override
    def _stages(self, in_channels: int, kernels: Any, strides: Any) -> nn.Sequential:
        counts = pairwise([in_channels, *FEATURES])
        return nn.Sequential(
            *(
                nn.Sequential(_block(own, deeper, kernel, stride, 2))
                for (own, deeper), kernel, stride in zip(counts, kernels, strides, strict=True)
            )
        )

    @override
    def _encoded(self, image: Tensor) -> list[Tensor]:
        encoder: Any = self.encoder
        skips = [image]
        for stage in encoder.stages:
            skips.append(_run(stage[0], skips[-1]))
        return skips[1:]


class ResidualEncoderUNet(_UNet):
    """A stem and residual blocks, of which the first of a stage has its stride; one convolution on the way
    up."""

    def __init__(
        self, in_channels: int, classes: int, kernels: Any = KERNELS, strides: Any = STRIDES
    ) -> None:
        super().__init__(in_channels, classes, kernels, strides, 1)
        self.encoder.stem = _block(in_channels, FEATURES[0], kernels[0], [1] * len(kernels[0]), 1)

    @override
    def _stages(self, in_channels: int, kernels: Any, strides: Any) -> nn.Sequential:
        stages = []
        counts = pairwise([FEATURES[0], *FEATURES])
        for (own, deeper), kernel, stride, length in zip(counts, kernels, strides, BLOCKS, strict=True):
            stage = nn.Module()
            stage.blocks = nn.Sequential(
                _residual(own, deeper, kernel, stride),
                *(_residual(deeper, deeper, kernel, [1] * len(kernel)) for _ in range(length - 1)),
            )
            stages.append(stage)
        return nn.Sequential(*stages)

    @override
    def _encoded(self, image: Tensor) -> list[Tensor]:
        encoder: Any = self.encoder
        found, skips = _run(encoder.stem, image), []
        for stage in encoder.stages:
            for block in stage.blocks:
                inner = nn.functional.leaky_relu(_normed(block.conv1, found), 0.01)
                past = found
                for layer in block.skip:
                    past = _normed(layer, past) if hasattr(layer, "conv") else layer(past)
                found = nn.functional.leaky_relu(_normed(block.conv2, inner) + past, 0.01)
            skips.append(found)
        return skips


def _conv(inputs: int, outputs: int, kernel: Sequence[int], stride: Any, *, bias: bool = True) -> nn.Module:
    conv = nn.Module()
    sizes = (tuple(kernel), stride, tuple(side // 2 for side in kernel))
    conv.conv = _CONVOLUTIONS[len(kernel)](inputs, outputs, *sizes, bias=bias)
    conv.norm = _NORMS[len(kernel)](outputs, affine=True)
    return conv


def _block(inputs: int, outputs: int, kernel: Sequence[int], stride: Sequence[int], count: int) -> nn.Module:
    block = nn.Module()
    block.convs = nn.Sequential(
        *(
            _conv(outputs if index else inputs, outputs, kernel, 1 if index else tuple(stride))
            for index in range(count)
        )
    )
    return block


def _residual(inputs: int, outputs: int, kernel: Sequence[int], stride: Sequence[int]) -> nn.Module:
    block, past = nn.Module(), list[nn.Module]()
    block.conv1 = _conv(inputs, outputs, kernel, tuple(stride))
    block.conv2 = _conv(outputs, outputs, kernel, 1)
    if any(side != 1 for side in stride):
        past.append(_POOLS[len(kernel)](tuple(stride), tuple(stride)))
    if inputs != outputs:
        past.append(_conv(inputs, outputs, [1] * len(kernel), 1, bias=False))
    block.skip = nn.Sequential(*past)
    return block


def _normed(conv: Any, found: Tensor) -> Tensor:
    normed: Tensor = conv.norm(conv.conv(found))
    return normed


def _run(block: Any, found: Tensor) -> Tensor:
    for conv in block.convs:
        found = nn.functional.leaky_relu(_normed(conv, found), 0.01)
    return found


def make_nnunet_folder(
    folder: Path,
    *,
    folds: Sequence[str] = ("0",),
    labels: Mapping[str, Any] | None = None,
    channels: Sequence[str] = ("T1",),
    plans: Mapping[str, Any] | None = None,
    configuration: Mapping[str, Any] | None = None,
    architecture: Mapping[str, Any] | None = None,
    dataset: Mapping[str, Any] | None = None,
    outputs: int = 3,
    name: str = "3d_fullres",
    residual: bool = False,
    slices: bool = False,
) -> list[Any]:
    """Write plans.json, dataset.json and a checkpoint per fold, and return the folds' networks.

    `residual` is of the ResEnc presets, `slices` of the configuration `2d`.
    """
    first = 1 if slices else 0
    kind = "ResidualEncoderUNet" if residual else "PlainConvUNet"
    kernels, strides = ([side[first:] for side in sides] for sides in (KERNELS, STRIDES))
    dims = 2 if slices else 3
    arguments = {
        "n_stages": len(FEATURES),
        "features_per_stage": FEATURES,
        "conv_op": f"torch.nn.modules.conv.Conv{dims}d",
        "kernel_sizes": kernels,
        "strides": strides,
        **({"n_blocks_per_stage": BLOCKS} if residual else {"n_conv_per_stage": [2] * len(FEATURES)}),
        "n_conv_per_stage_decoder": [1 if residual else 2] * (len(FEATURES) - 1),
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{dims}d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }
    resampling = {"is_seg": False, "order_z": 0, "force_separate_z": None}
    written = {
        "data_identifier": f"nnUNetPlans_{name}",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": [8, 16, 16][first:],
        "spacing": [3.0, 1.0, 1.5][first:],
        "normalization_schemes": ["ZScoreNormalization"] * len(channels),
        "use_mask_for_norm": [False] * len(channels),
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_seg": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": {**resampling, "order": 3},
        "resampling_fn_seg_kwargs": {**resampling, "is_seg": True, "order": 1},
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities_kwargs": {**resampling, "order": 1},
        "batch_dice": False,
        "architecture": {
            "network_class_name": f"dynamic_network_architectures.architectures.unet.{kind}",
            "arch_kwargs": arguments,
            "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
            **(architecture or {}),
        },
        **(configuration or {}),
    }
    content = {
        "dataset_name": "Dataset047_Blobs",
        "plans_name": "nnUNetPlans",
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "foreground_intensity_properties_per_channel": {},
        "configurations": {name: {key: value for key, value in written.items() if value is not None}},
        **(plans or {}),
    }
    folder.mkdir(parents=True)
    (folder / "plans.json").write_text(json.dumps(content))
    described = {
        "channel_names": {str(index): each for index, each in enumerate(channels)},
        "labels": labels or {"background": 0, "shell": 1, "core": 2},
        "file_ending": ".nii.gz",
        **(dataset or {}),
    }
    (folder / "dataset.json").write_text(json.dumps(described))
    networks = []
    for index, fold in enumerate(folds):
        with torch.random.fork_rng():
            torch.manual_seed(index)
            made = ResidualEncoderUNet if residual else PlainConvUNet
            network = made(len(channels), outputs, kernels, strides)
            for parameter in network.parameters():
                nn.init.normal_(parameter, std=0.3)
        (folder / f"fold_{fold}").mkdir()
        checkpoint = {
            "network_weights": network.state_dict(),
            "init_args": {"configuration": name, "fold": fold},
            "trainer_name": "nnUNetTrainer",
            "inference_allowed_mirroring_axes": tuple(range(dims)),
        }
        torch.save(checkpoint, folder / f"fold_{fold}" / "checkpoint_final.pth")
        networks.append(network.eval())
    return networks
