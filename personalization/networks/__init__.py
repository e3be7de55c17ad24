"""Build networks by name and arguments: `build("unet", in_channels=1, classes=2)`."""

from __future__ import annotations

from personalization.networks.backbone import Backbone, BlockBackbone, build_backbone
from personalization.networks.fedoap import FedOapUNet
from personalization.networks.registry import build, initialise, names, outline, register

__all__ = [
    "Backbone",
    "BlockBackbone",
    "FedOapUNet",
    "build",
    "build_backbone",
    "initialise",
    "names",
    "outline",
    "register",
]
