"""Make MONAI bundles with random weights, as those of MONAI's model zoo are laid out; run any by MONAI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.bundle import ConfigParser
from monai.networks import nets
from numpy.typing import NDArray

LABELS = {"0": "background", "1": "anterior", "2": "posterior"}
NETWORK: dict[str, Any] = {
    "_target_": "UNet",
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 3,
    "channels": [4, 8, 16],
    "strides": [2, 2],
    "num_res_units": 1,
    "norm": "batch",
}
# spleen_ct_segmentation's: it resamples, and then scales.
SPLEEN: list[dict[str, Any]] = [
    {"_target_": "LoadImaged", "keys": "@image_key"},
    {"_target_": "EnsureChannelFirstd", "keys": "@image_key"},
    {"_target_": "Orientationd", "keys": "@image_key", "axcodes": "RAS"},
    {"_target_": "Spacingd", "keys": "@image_key", "pixdim": [1.5, 1.5, 2.0], "mode": "bilinear"},
    {
        "_target_": "ScaleIntensityRanged",
        "keys": "@image_key",
        "a_min": -57,
        "a_max": 164,
        "b_min": 0,
        "b_max": 1,
        "clip": True,
    },
    {"_target_": "EnsureTyped", "keys": "@image_key"},
]
INVERT = {
    "_target_": "Invertd",
    "keys": "pred",
    "transform": "@preprocessing",
    "orig_keys": "@image_key",
    "nearest_interp": False,
    "to_tensor": True,
}
SOFTMAX = {"_target_": "Activationsd", "keys": "pred", "softmax": True}
ARGMAX = {"_target_": "AsDiscreted", "keys": "pred", "argmax": True}
SAVE = {"_target_": "SaveImaged", "keys": "pred", "output_dir": "$@bundle_root + '/eval'"}
PROBABILITIES = [SOFTMAX, INVERT, ARGMAX, SAVE]
WINDOW: dict[str, Any] = {
    "_target_": "SlidingWindowInferer",
    "roi_size": [16, 16, 16],
    "sw_batch_size": 4,
    "overlap": 0.5,
}


def make_bundle(
    folder: Path,
    *,
    network: Mapping[str, Any] = NETWORK,
    before: list[dict[str, Any]] | None = None,
    after: list[dict[str, Any]] | None = None,
    inferer: Mapping[str, Any] = WINDOW,
    labels: Mapping[str, str] | None = None,
    channels: tuple[str, ...] = ("image",),
    modality: str = "CT",
    further: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a bundle into `folder`, with weights drawn from `seed`, and return the folder."""
    inference = {
        "imports": ["$import glob"],
        "bundle_root": ".",
        "image_key": "image",
        "device": "$torch.device('cpu')",
        "datalist": "$sorted(glob.glob(@bundle_root + '/*.nii.gz'))",
        "network_def": dict(network),
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": SPLEEN if before is None else before},
        "inferer": dict(inferer),
        "postprocessing": {"_target_": "Compose", "transforms": PROBABILITIES if after is None else after},
        **(further or {}),
    }
    named = dict(LABELS if labels is None else labels)
    metadata = {
        "version": "0.5.6",
        "name": "Spleen CT segmentation",
        "network_data_format": {
            "inputs": {
                "image": {
                    "modality": modality,
                    "num_channels": len(channels),
                    "channel_def": {str(index): name for index, name in enumerate(channels)},
                }
            },
            "outputs": {"pred": {"num_channels": len(named), "channel_def": named}},
        },
    }
    for name in ("configs", "models"):
        (folder / name).mkdir(parents=True)
    (folder / "configs" / "inference.json").write_text(json.dumps(inference))
    (folder / "configs" / "metadata.json").write_text(json.dumps(metadata))
    (folder / "LICENSE").write_text("Apache License\nVersion 2.0, January 2004\n")
    arguments = {key: value for key, value in network.items() if key != "_target_"}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = getattr(nets, str(network["_target_"]).rpartition(".")[2])(**arguments)
        for module in made.modules():
            # Statistics as after a training: those of a new network would hide that they are read.
            if isinstance(module, torch.nn.BatchNorm3d):
                module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    torch.save(made.state_dict(), folder / "models" / "model.pt")
    return folder


def by_monai(folder: Path, scan: Path) -> NDArray[Any]:
    """The mask by MONAI's own parser, transforms and inferer, without the transform that saves it."""
    parser = ConfigParser()
    parser.read_config(str(folder / "configs" / "inference.json"))
    parser["bundle_root"] = str(folder)
    parser["device"] = "$torch.device('cpu')"
    parser["postprocessing::transforms"] = parser["postprocessing::transforms"][:-1]
    network = parser.get_parsed_content("network_def")
    network.load_state_dict(torch.load(folder / "models" / "model.pt", weights_only=True))
    served = parser.get_parsed_content("network").eval()
    data = parser.get_parsed_content("preprocessing")({"image": str(scan)})
    with torch.no_grad():
        data["pred"] = parser.get_parsed_content("inferer")(data["image"][None], served)[0]
    found = parser.get_parsed_content("postprocessing")(data)["pred"]
    return np.asarray(found[0] if len(found) == 1 else found)
