"""What is before and after the network in bundles of MONAI's model zoo (October 2024), by transform.

Their networks and weights are left out: the bundles of `make_bundle` have small networks with random weights.
"""

from __future__ import annotations

from typing import Any

from tests.helpers.training.bundles import ARGMAX, INVERT, SAVE, SOFTMAX, WINDOW

_KEY = {"keys": "image"}
_LOAD, _FIRST, _TYPE = (
    {"_target_": name, **_KEY} for name in ("LoadImaged", "EnsureChannelFirstd", "EnsureTyped")
)
_RAS = {"_target_": "Orientationd", **_KEY, "axcodes": "RAS"}
_NEAREST = {**INVERT, "nearest_interp": True}
_USUAL = [SOFTMAX, INVERT, ARGMAX, SAVE]


def _spacing(*pixdim: float) -> dict[str, Any]:
    return {"_target_": "Spacingd", **_KEY, "pixdim": list(pixdim), "mode": "bilinear"}


def _window(low: float, high: float) -> dict[str, Any]:
    scaled = {"a_min": low, "a_max": high, "b_min": 0.0, "b_max": 1.0, "clip": True}
    return {"_target_": "ScaleIntensityRanged", **_KEY, **scaled}


def _ct(low: float, high: float, *pixdim: float, overlap: float = 0.5, **more: Any) -> dict[str, Any]:
    before = [_LOAD, _FIRST, _RAS, _spacing(*pixdim), _window(low, high), _TYPE]
    return {"before": before, "after": _USUAL, "inferer": {**WINDOW, "overlap": overlap}, **more}


_PEDIATRIC = _ct(-250, 400, 1.5, 1.5, 3.0, overlap=0.75)
_CROP = {"_target_": "CropForegroundd", "keys": ["image"], "source_key": "image", "mode": ["minimum"]}
_CAST = {"_target_": "CastToTyped", **_KEY, "dtype": "$torch.float32"}

ZOO: dict[str, dict[str, Any]] = {
    "spleen_ct_segmentation": _ct(-57, 164, 1.5, 1.5, 2.0),
    "swin_unetr_btcv_segmentation": _ct(-175, 250, 1.5, 1.5, 2.0),
    "multi_organ_segmentation": _ct(-500, 500, 1, 1, 1, overlap=0.625),
    "pancreas_ct_dints_segmentation": _ct(-87, 199, 1, 1, 1, overlap=0.625),
    "renalStructures_UNEST_segmentation": {
        **_ct(-175, 250, 1.0, 1.0, 1.0),
        "before": [
            _LOAD,
            {**_FIRST, "channel_dim": "no_channel"},
            _RAS,
            _spacing(1.0, 1.0, 1.0),
            _window(-175, 250),
            _TYPE,
        ],
    },
    "wholeBody_ct_segmentation": {
        "before": [
            _LOAD,
            _TYPE,
            _FIRST,
            _RAS,
            _spacing(1.5, 1.5, 1.5),
            {"_target_": "NormalizeIntensityd", **_KEY, "nonzero": True},
            {"_target_": "ScaleIntensityd", **_KEY, "minv": -1.0, "maxv": 1.0},
        ],
        "after": [SOFTMAX, ARGMAX, _NEAREST, SAVE],
        "inferer": {**WINDOW, "overlap": 0.25, "padding_mode": "replicate", "mode": "gaussian"},
    },
    "wholeBrainSeg_Large_UNEST_segmentation": {
        # Written so: any text that is not empty is true.
        "before": [
            _LOAD,
            _FIRST,
            {"_target_": "NormalizeIntensityd", **_KEY, "nonzero": "True", "channel_wise": "True"},
            _TYPE,
        ],
        "after": _USUAL,
        "inferer": {**WINDOW, "overlap": 0.7},
        "modality": "MR",
    },
    "pediatric_abdominal_ct_segmentation": {
        **_PEDIATRIC,
        "before": [*_PEDIATRIC["before"][:-1], _CROP, _TYPE, _CAST],
    },
    "brats_mri_segmentation": {
        "before": [
            {**_LOAD, "image_only": False},
            _FIRST,
            {"_target_": "NormalizeIntensityd", **_KEY, "nonzero": True, "channel_wise": True},
        ],
        "after": [
            {"_target_": "Activationsd", "keys": "pred", "sigmoid": True},
            {**INVERT, "meta_keys": "pred_meta_dict"},
            {"_target_": "AsDiscreted", "keys": "pred", "threshold": 0.5},
            {"_target_": "Lambdad", "keys": "pred", "func": "$lambda x: x"},
            SAVE,
        ],
        "inferer": WINDOW,
        "modality": "MR",
    },
    "prostate_mri_anatomy": {
        "before": [
            _LOAD,
            _FIRST,
            _RAS,
            _spacing(0.5, 0.5, 0.5),
            {"_target_": "ScaleIntensityd", **_KEY, "minv": 0, "maxv": 1},
            {"_target_": "NormalizeIntensityd", **_KEY},
            _TYPE,
        ],
        "after": [
            ARGMAX,
            {"_target_": "KeepLargestConnectedComponentd", "keys": "pred", "applied_labels": [1, 2]},
            {**INVERT, "meta_key_postfix": "meta_dict"},
            SAVE,
        ],
        "inferer": WINDOW,
        "modality": "MR",
    },
}
"""By the bundle's name. Of brats one channel, not four, and of its last step that it is a Lambda."""
