"""MONAI's networks, as a bundle has them, by our names and arguments: what an importer asks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from monai.networks import nets
from torch import Tensor

from personalization.errors import NetworkError
from personalization.networks.monai.networks import CLASSES, MOST_DOUBLED, DynUNet, MedNeXt

_RENAMED = {"out_channels": "classes", "init_filters": "width"}
# Without weights and without effect where a network answers. What else is left out has to be off.
_WITHOUT_EFFECT = {"dropout", "dropout_prob", "deep_supervision", "deep_supr_num", "is_pad", "pretrained"}
_OFF: Mapping[str, tuple[Any, ...]] = {
    "use_conv_final": (True,),
    "norm_name": ("",),
    "num_groups": (8,),
    "adn_ordering": ("NDA",),
    "norm_type": ("group",),
    "global_resp_norm": (False,),
    "pre_conv": ("default",),
    "interp_mode": ("nearest",),
}


_LEFT_OUT = {
    DynUNet.NAME: ("skip_layers.", "deep_supervision_heads."),
    MedNeXt.NAME: ("out_blocks.",),
}


def translated(monai_class: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments here of a network that MONAI's class builds from its own arguments.

    What MONAI takes by default is written down, so that the answer does not depend on a version of MONAI.
    Raises NetworkError for a class that is not on the list, or an argument that it has not here.
    """
    if monai_class not in CLASSES:
        raise NetworkError(f"MONAI's {monai_class}: expected one of {', '.join(CLASSES)}")
    ours = CLASSES[monai_class]
    theirs = inspect.signature(getattr(nets, monai_class).__init__)
    try:
        bound = theirs.bind(None, **arguments)
    except TypeError as error:
        raise NetworkError(f"MONAI's {monai_class}: {error}; expected {theirs}") from error
    bound.apply_defaults()
    if monai_class == "SegResNet" and str(bound.arguments["norm_name"]).lower() == "group":
        # Its older spelling, which MONAI still takes.
        bound.arguments |= {
            "norm_name": "",
            "norm": ["group", {"num_groups": bound.arguments["num_groups"]}],
            "num_groups": 8,
        }
    taken = inspect.signature(ours).parameters
    found: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        renamed = _RENAMED.get(name, name)
        if renamed in taken:
            found[renamed] = value
        elif name not in _WITHOUT_EFFECT and value not in _OFF.get(name, ()):
            raise NetworkError(f"{ours.NAME}: {name}: expected MONAI's default, found {value!r}")
    for name in ("norm", "norm_name"):
        # A bare name has the affine parameters of torch's layer: none of an instance norm.
        if isinstance(found.get(name), str) and found[name].lower() == "instance":
            found[name] = ["instance", {"affine": False}]
    if monai_class == "DynUNet" and found["filters"] is None:
        most = MOST_DOUBLED[found["spatial_dims"]]
        found["filters"] = [min(2 ** (5 + stage), most) for stage in range(len(found["strides"]))]
    return ours.NAME, {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, str) else value


def translated_state(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """MONAI's weights of a network of this name by our names: without the heads of deep supervision, which
    only training uses, and each of DynUNet's once."""
    left_out = _LEFT_OUT.get(name, ())
    return {key: value for key, value in state.items() if not (left_out and key.startswith(left_out))}
