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


class PlainConvUNet(nn.Module):
    """nnU-Net's network by the names of its parameters, without those that name the same tensor again.

    dynamic_network_architectures 0.4.4: two convolutions, instance norms and LeakyReLU per stage; the first
    convolution of a stage has its stride; a transposed convolution with the stride as its kernel leads up.
    """

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__()
        counts = [in_channels, *FEATURES]
        self.encoder = nn.Module()
        self.encoder.stages = nn.Sequential(
            *(
                nn.Sequential(_block(own, deeper, kernel, stride))
                for (own, deeper), kernel, stride in zip(pairwise(counts), KERNELS, STRIDES, strict=True)
            )
        )
        self.decoder = nn.Module()
        levels = range(len(FEATURES) - 2, -1, -1)
        ups = [_up(FEATURES[level + 1], FEATURES[level], STRIDES[level + 1]) for level in levels]
        self.decoder.transpconvs = nn.ModuleList(ups)
        self.decoder.stages = nn.ModuleList(
            _block(2 * FEATURES[level], FEATURES[level], KERNELS[level], [1, 1, 1]) for level in levels
        )
        self.decoder.seg_layers = nn.ModuleList(nn.Conv3d(FEATURES[level], classes, 1) for level in levels)

    @override
    def forward(self, image: Tensor) -> Tensor:
        encoder: Any = self.encoder
        decoder: Any = self.decoder
        skips = [image]
        for stage in encoder.stages:
            skips.append(_run(stage[0], skips[-1]))
        found = skips.pop()
        for up, stage in zip(decoder.transpconvs, decoder.stages, strict=True):
            found = _run(stage, torch.cat((up(found), skips.pop()), 1))
        logits: Tensor = decoder.seg_layers[-1](found)
        return logits


def _up(inputs: int, outputs: int, stride: Any) -> nn.Module:
    return nn.ConvTranspose3d(inputs, outputs, tuple(stride), tuple(stride))


def _block(inputs: int, outputs: int, kernel: Sequence[int], stride: Sequence[int]) -> nn.Module:
    block = nn.Module()
    block.convs = nn.Sequential()
    for index in range(2):
        conv = nn.Module()
        sizes: Any = (kernel, stride if index == 0 else 1, [side // 2 for side in kernel])
        conv.conv = nn.Conv3d(inputs if index == 0 else outputs, outputs, *sizes)
        conv.norm = nn.InstanceNorm3d(outputs, affine=True)
        block.convs.append(conv)
    return block


def _run(block: Any, found: Tensor) -> Tensor:
    for conv in block.convs:
        found = nn.functional.leaky_relu(conv.norm(conv.conv(found)), 0.01)
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
) -> list[PlainConvUNet]:
    """Write plans.json, dataset.json and a checkpoint per fold, and return the folds' networks."""
    arguments = {
        "n_stages": len(FEATURES),
        "features_per_stage": FEATURES,
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": KERNELS,
        "strides": STRIDES,
        "n_conv_per_stage": [2] * len(FEATURES),
        "n_conv_per_stage_decoder": [2] * (len(FEATURES) - 1),
        "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }
    resampling = {"is_seg": False, "order_z": 0, "force_separate_z": None}
    written = {
        "patch_size": [8, 16, 16],
        "spacing": [3.0, 1.0, 1.5],
        "normalization_schemes": ["ZScoreNormalization"] * len(channels),
        "use_mask_for_norm": [False] * len(channels),
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": {**resampling, "order": 3},
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities_kwargs": {**resampling, "order": 1},
        "architecture": {
            "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
            "arch_kwargs": arguments,
            **(architecture or {}),
        },
        **(configuration or {}),
    }
    content = {
        "dataset_name": "Dataset047_Blobs",
        "plans_name": "nnUNetPlans",
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
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
            network = PlainConvUNet(len(channels), outputs)
            for parameter in network.parameters():
                nn.init.normal_(parameter, std=0.3)
        (folder / f"fold_{fold}").mkdir()
        checkpoint = {
            "network_weights": network.state_dict(),
            "init_args": {"configuration": name, "fold": fold},
            "trainer_name": "nnUNetTrainer",
            "inference_allowed_mirroring_axes": (0, 1, 2),
        }
        torch.save(checkpoint, folder / f"fold_{fold}" / "checkpoint_final.pth")
        networks.append(network.eval())
    return networks
