"""Registry of networks: build one by the name and arguments that a manifest records, and initialise it.

A network is one line of `_NETWORKS`. Its module is imported when the network is first built.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from personalization.errors import NetworkError
from personalization.networks.capabilities import NORMS, Convolution

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])

# MODULE:NAME of the class or function that builds it, by the name that manifests record: it must not change.
_NETWORKS: dict[str, str | Callable[..., nn.Module]] = {
    "averaged": "personalization.networks.averaged:Averaged",
    "blended": "personalization.networks.instance_norm:Blended",
    "efficientnet_unet": "personalization.networks.efficientnet_unet:EfficientNetUNet",
    "fedoap": "personalization.networks.fedoap:FedOapUNet",
    "graph": "personalization.networks.opaque:opaque",
    "monai.attentionunet": "personalization.networks.monai:AttentionUnet",
    "monai.basicunet": "personalization.networks.monai:BasicUNet",
    "monai.dynunet": "personalization.networks.monai:DynUNet",
    "monai.flexibleunet": "personalization.networks.monai:FlexibleUNet",
    "monai.mednext": "personalization.networks.monai:MedNeXt",
    "monai.segresnet": "personalization.networks.monai:SegResNet",
    "monai.unet": "personalization.networks.monai:UNet",
    "projected": "personalization.networks.projected:projected",
    "prompted": "personalization.networks.prompted:Prompted",
    "resnet18": "personalization.networks.resnet:ResNet18",
    "unet": "personalization.networks.unet:UNet",
    "vit": "personalization.networks.vit:ViT",
}
# What a method builds where no network is named.
DEFAULTS: Mapping[Literal["segmentation", "classification"], str] = {
    "segmentation": "unet",
    "classification": "resnet18",
}


@runtime_checkable
class DrawsItself(Protocol):
    """A module that initialises its own parameters."""

    def draw(self, generator: torch.Generator) -> None:
        """Redraw the module's own parameters, in place."""


def register(name: str) -> Callable[[Builder], Builder]:
    """Register a network of another package under `name` (a decorator of its class or builder).

    Raises NetworkError for a name that is taken.
    """

    def enter(network: Builder) -> Builder:
        if name in _NETWORKS:
            raise NetworkError(f"network '{name}' is registered twice: {_NETWORKS[name]} and {network}")
        _NETWORKS[name] = network
        return network

    return enter


def names() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_NETWORKS))


def builder(name: str) -> Callable[..., nn.Module]:
    """The class or function that builds the network `name`.

    Raises NetworkError for an unknown name, listing the known ones.
    """
    if name not in _NETWORKS:
        raise NetworkError(f"unknown network '{name}'; known: {', '.join(names())}")
    found = _NETWORKS[name]
    if isinstance(found, str):
        module, attribute = found.split(":")
        found = _NETWORKS[name] = getattr(import_module(module), attribute)
    return found


def build(name: str, /, **arguments: Any) -> nn.Module:
    """Build the network `name` with PyTorch's default weights; `initialise` redraws them from a generator.

    Raises NetworkError for an unknown name (listing the known ones) or arguments that do not fit.
    """
    network = builder(name)
    signature = inspect.signature(network)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise NetworkError(f"network '{name}': {error}; expected {signature}, found {arguments}") from error
    return network(**arguments)


def outline(name: str, /, **arguments: Any) -> nn.Module:
    """Build a network on the meta device: its layers, names and shapes, no weights. Raises as `build`."""
    with torch.device("meta"):
        return build(name, **arguments)


def check_arguments(network: str, in_channels: int, classes: int, width: int) -> None:
    """Check the arguments common to all networks. Raises NetworkError with the network and the argument."""
    for name, value, least in (("in_channels", in_channels, 1), ("classes", classes, 2), ("width", width, 1)):
        if value < least:
            raise NetworkError(f"{network}: {name} must be at least {least}, found {value}")


def initialise(network: nn.Module, generator: torch.Generator) -> nn.Module:
    """Redraw every weight with PyTorch's default scheme, from `generator` instead of the global one.

    Weights are redrawn in place and in module order, so that a seed always gives the same network. Returns
    the network. Raises NetworkError for a layer with no known default scheme.
    """
    for path, module in network.named_modules():
        if isinstance(module, Convolution | nn.Linear):
            # Not drawn in place, because that would follow the weight's memory format (channels last)
            weight = torch.empty(module.weight.shape, dtype=module.weight.dtype)
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
            _put(module.weight, weight)
            if module.bias is not None:
                # kaiming's fan-in is over dimension 1 of the weight, also for transposed convolutions
                bound = 1 / math.sqrt(weight[0].numel())
                bias = torch.empty(module.bias.shape, dtype=module.bias.dtype)
                _put(module.bias, nn.init.uniform_(bias, -bound, bound, generator=generator))
        elif isinstance(module, (*NORMS, nn.PReLU)):
            module.reset_parameters()
        elif isinstance(module, DrawsItself):
            module.draw(generator)
        elif any(True for _ in module.parameters(recurse=False)):
            raise NetworkError(
                f"{path or 'network'}: no default initialisation known for {type(module).__name__}"
            )
    return network


@torch.no_grad()
def _put(parameter: torch.Tensor, value: torch.Tensor) -> None:
    parameter.copy_(value)
