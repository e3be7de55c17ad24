"""Build networks by name and arguments: `build("unet", in_channels=1, classes=2)`."""

from __future__ import annotations

from personalization.networks.backbone import Backbone, build_backbone
from personalization.networks.fedoap import FedOapUNet
from personalization.networks.prompted import Prompted
from personalization.networks.registry import build, initialise, names, register
from personalization.networks.resnet import ResNet18
from personalization.networks.unet import UNet
from personalization.networks.vit import ViT

__all__ = [
    "Backbone",
    "FedOapUNet",
    "Prompted",
    "ResNet18",
    "UNet",
    "ViT",
    "build",
    "build_backbone",
    "initialise",
    "names",
    "register",
]
