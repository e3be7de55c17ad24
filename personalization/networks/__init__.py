"""The networks, built by name and arguments: `build("unet", in_channels=1, classes=2)`."""

from __future__ import annotations

from personalization.networks.fedoap import FedOapUNet
from personalization.networks.registry import build, initialise, names, register
from personalization.networks.resnet import ResNet18
from personalization.networks.unet import UNet

__all__ = ["FedOapUNet", "ResNet18", "UNet", "build", "initialise", "names", "register"]
