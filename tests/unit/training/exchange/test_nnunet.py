"""A folder of nnU-Net v2 becomes MONAI's DynUNet and a task, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model_store.normalisation import Clip, ZScore
from personalization.networks import build
from tests.helpers.training.nnunet_folders import make_nnunet_folder
from training.errors import ImportRefused
from training.exchange import checkpoints, nnunet
from training.exchange.imported import Imported
from training.exchange.source import Source

_CT = {"mean": 117.5, "std": 23.2, "percentile_00_5": 80.1, "percentile_99_5": 190.4}
_OLD = {
    "architecture": None,
    "UNet_class_name": "PlainConvUNet",
    "UNet_base_num_features": 4,
    "unet_max_num_features": 320,
    "n_conv_per_stage_encoder": [2, 2, 2],
    "n_conv_per_stage_decoder": [2, 2],
    "conv_kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    "pool_op_kernel_sizes": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
}


def _read(path: Path, *folds: str, mirror: bool = True) -> Imported:
    with Source(path) as source:
        return nnunet.read(source, folds, mirror=mirror)


def _logits(found: Imported, image: torch.Tensor) -> torch.Tensor:
    network = build(found.network.name, **found.network.arguments).eval()
    checkpoints.fill(network, found.state, "x")
    with torch.no_grad():
        answer: torch.Tensor = network(image)
    return answer


def _image() -> torch.Tensor:
    return torch.randn(1, 1, 8, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("configuration", [{}, _OLD])
def test_the_network_is_nnunets_with_kernels_that_grow_and_in_both_forms_of_plans(
    tmp_path: Path, configuration: dict[str, Any]
) -> None:
    (theirs,) = make_nnunet_folder(tmp_path / "model", configuration=configuration)
    found = _read(tmp_path / "model")
    with torch.no_grad():
        expected = theirs(_image())

    assert found.network.name == "monai.dynunet"
    torch.testing.assert_close(_logits(found, _image()), expected, atol=1e-5, rtol=1e-5)


def test_folds_are_averaged_as_logits(tmp_path: Path) -> None:
    theirs = make_nnunet_folder(tmp_path / "model", folds=("0", "1", "4"))
    with torch.no_grad():
        each = [network(_image()) for network in theirs]

    all_folds, two = _read(tmp_path / "model"), _read(tmp_path / "model", "0", "4")

    torch.testing.assert_close(_logits(all_folds, _image()), torch.stack(each).mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(_logits(two, _image()), (each[0] + each[2]) / 2, atol=1e-5, rtol=1e-5)
    assert two.details["folds"] == ["0", "4"]
    assert two.weights.sha256 != all_folds.weights.sha256


def test_the_task_is_that_of_the_plans(tmp_path: Path) -> None:
    make_nnunet_folder(
        tmp_path / "model",
        channels=("CT", "T1"),
        configuration={
            "normalization_schemes": ["CTNormalization", "ZScoreNormalization"],
            "use_mask_for_norm": [False, True],
        },
        plans={"foreground_intensity_properties_per_channel": {"0": _CT}, "transpose_forward": [1, 0, 2]},
        labels={"background": 0, "shell": 1, "core": 2, "ignore": 3},
        dataset={"license": "CC-BY-SA 4.0"},
    )
    found = _read(tmp_path / "model")
    task, geometry = found.task, found.task.geometry

    assert geometry is not None
    assert (task.name, task.labels) == ("blobs", {"shell": (1,), "core": (2,)})
    assert (geometry.axes, geometry.patch, geometry.spacing) == ("jki", (8, 16, 16), (3.0, 1.0, 1.5))
    assert (geometry.window, geometry.resampling, geometry.crop) == ("nnunet", "nnunet", "nonzero")
    assert (geometry.average, geometry.restore, geometry.normalise) == ("logits", "logits", "before")
    assert geometry.mirror == (0, 1, 2)
    first, second = (channel.normalisation.ordered_steps for channel in task.channel_list)
    assert first == (Clip(window=(80.1, 190.4)), ZScore(mean=117.5, std=23.2))
    assert second == (ZScore(within="region"),)
    assert found.weights.licence == "CC-BY-SA 4.0"
    unmirrored = _read(tmp_path / "model", mirror=False).task.geometry
    assert unmirrored is not None
    assert unmirrored.mirror == ()


def test_regions_are_a_sigmoid_for_each_label(tmp_path: Path) -> None:
    regions = {"background": 0, "outer": [1, 2, 3], "middle": [2, 3], "inner": 3}
    make_nnunet_folder(tmp_path / "model", labels=regions, dataset={"regions_class_order": [1, 2, 3]})

    task = _read(tmp_path / "model").task

    assert task.regions
    assert task.labels == {"outer": (1, 2, 3), "middle": (2, 3), "inner": (3,)}


def test_regions_in_an_order_that_a_task_cannot_say_are_refused(tmp_path: Path) -> None:
    regions = {"background": 0, "inner": 2, "outer": [1, 2]}
    make_nnunet_folder(tmp_path / "model", labels=regions, dataset={"regions_class_order": [2, 1]}, outputs=2)

    with pytest.raises(ImportRefused, match="expected the largest region first"):
        _read(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"architecture": {"network_class_name": "x.architectures.unet.ResidualEncoderUNet"}},
            "is a ResidualEncoderUNet; expected PlainConvUNet",
        ),
        (
            {"configuration": {"architecture": None, "UNet_class_name": "ResidualEncoderUNet"}},
            "ResidualEncoderUNet",
        ),
        ({"configuration": {"patch_size": [16, 16]}}, "cuts volumes into slices"),
        ({"configuration": {"previous_stage": "3d_lowres"}}, "second stage of a cascade"),
        ({"configuration": {"resampling_fn_data": "resample_torch_simple"}}, "resample_torch_simple"),
        ({"configuration": {"normalization_schemes": ["Own"]}}, "expected a normalisation of nnU-Net"),
        ({"configuration": {"normalization_schemes": ["CTNormalization"]}}, "found 'CTNormalization'"),
        ({"configuration": {"inherits_from": "nowhere"}}, "'nowhere', found none"),
        ({"configuration": {"inherits_from": "3d_fullres"}}, "found none"),
        ({"plans": {"image_reader_writer": "Tiff3DIO"}}, "Tiff3DIO"),
        ({"plans": {"transpose_forward": [0, 0, 1]}}, "transpose_forward"),
        ({"configuration": {"patch_size": [8, 16, "x"]}}, "patch_size"),
        (
            {"configuration": {**_OLD, "UNet_base_num_features": 2048, "unet_max_num_features": 2048}},
            "fold_0/checkpoint_final.pth: expected at most 64 MiB of weights by plans.json",
        ),
        (
            {"configuration": {**_OLD, "conv_kernel_sizes": [[1, 3, 3], [9, 9, 9], [99, 99, 99]]}},
            "plans.json: monai.dynunet: kernel_size",
        ),
        (
            {"configuration": {**_OLD, "UNet_base_num_features": 5}},
            r"encoder.stages.0.0.convs.0.conv.weight: expected \[5, 1\] channels by plans.json",
        ),
        ({"folds": ()}, "found no fold"),
        ({"folds": ("9x",)}, "found no fold"),
    ],
)
def test_what_is_another_network_or_other_plans_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    make_nnunet_folder(tmp_path / "model", **change)
    with pytest.raises(ImportRefused, match=said):
        _read(tmp_path / "model")


def test_a_missing_tensor_and_a_missing_fold_are_named(tmp_path: Path) -> None:
    make_nnunet_folder(tmp_path / "model")
    with pytest.raises(ImportRefused, match=r"fold_3/checkpoint_final.pth"):
        _read(tmp_path / "model", "3")
    file = tmp_path / "model" / "fold_0" / "checkpoint_final.pth"
    found = torch.load(file, weights_only=True)
    del found["network_weights"]["decoder.seg_layers.1.weight"]
    torch.save(found, file)
    with pytest.raises(ImportRefused, match=r"tensor decoder.seg_layers.1.weight"):
        _read(tmp_path / "model")
