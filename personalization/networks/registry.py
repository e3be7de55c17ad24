"""Registry of networks: build one by the name and arguments that a manifest records, and initialise it.

A network is one line of `_NETWORKS`. Its module is imported when the network is first built. A package that
is installed adds its own by an entry point of the group `locum.networks`; no class travels with a model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from personalization.errors import NetworkError
from personalization.networks.capabilities import NORMS, Convolution, TaskKind

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])

# MODULE:NAME of the class or function that builds it, by the name that manifests record: it must not change.
_NETWORKS: dict[str, str | Callable[..., nn.Module]] = {
    "averaged": "personalization.networks.averaged:Averaged",
    "blended": "personalization.networks.instance_norm:Blended",
    "efficientnet_unet": "personalization.networks.efficientnet_unet:EfficientNetUNet",
    "fedoap": "personalization.networks.fedoap:FedOapUNet",
    "graph": "personalization.networks.opaque:opaque",
    "monai.attentionunet": "personalization.networks.monai.networks:AttentionUnet",
    "monai.basicunet": "personalization.networks.monai.networks:BasicUNet",
    "monai.dynunet": "personalization.networks.monai.networks:DynUNet",
    "monai.flexibleunet": "personalization.networks.monai.networks:FlexibleUNet",
    "monai.mednext": "personalization.networks.monai.networks:MedNeXt",
    "monai.segresnet": "personalization.networks.monai.networks:SegResNet",
    "monai.unet": "personalization.networks.monai.networks:UNet",
    "projected": "personalization.networks.projected:projected",
    "resenc": "personalization.networks.resenc:ResEnc",
    "resnet18": "personalization.networks.resnet:ResNet18",
    "unet": "personalization.networks.unet:UNet",
    "vit": "personalization.networks.vit:ViT",
}
# Those that methods, presets and importers make: manifests name them, and a person chooses none of them.
_MADE = frozenset({"averaged", "blended", "fedoap", "graph", "projected"})
# What a method builds where no network is named, by kind and spatial dimensions of the task.
DEFAULTS: Mapping[tuple[TaskKind, int], str] = {
    ("segmentation", 2): "unet",
    ("segmentation", 3): "monai.dynunet",
    ("classification", 2): "resnet18",
}


# Entry points with networks of other packages: `NAME = "package.module:Class"`.
GROUP = "locum.networks"


_most_parameters: ContextVar[tuple[int, str] | None] = ContextVar("most_parameters", default=None)


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


@cache
def installed() -> Mapping[str, EntryPoint]:
    """Networks of installed packages by name.

    Raises NetworkError for a name that two packages have, or that is one of Locum's own.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = found.get(entry.name)
        if entry.name in _NETWORKS or other is not None:
            owner = "Locum" if other is None else _package(other)
            raise NetworkError(
                f"network '{entry.name}' of {_package(entry)}: {owner} has one of this name; rename its "
                "entry point"
            )
        found[entry.name] = entry
    return found


def origin_of(name: str) -> dict[str, str] | None:
    """Class, package and version of a network of an installed package; None for one of Locum's own."""
    if name in _NETWORKS:
        return None
    entry = installed().get(name)
    if entry is None or entry.dist is None:
        return None
    return {"class": entry.value, "package": entry.dist.name, "version": entry.dist.version}


def check_origin(name: str, origin: Mapping[str, str] | None) -> None:
    """Check that a network of another package is here as a manifest records it.

    Raises NetworkError where the package is not installed, or in another version.
    """
    if origin is None or (found := origin_of(name)) == origin:
        return
    here = "it is not installed" if found is None else f"found {_words(found)}"
    raise NetworkError(
        f"network '{name}': expected {_words(origin)}, {here}: install {origin.get('package')}=="
        f"{origin.get('version')} wherever this model is trained or adapted"
    )


def _words(origin: Mapping[str, str]) -> str:
    return f"{origin.get('class')} of {origin.get('package')} {origin.get('version')}"


def _package(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"package {entry.dist.name}"


def names() -> tuple[str, ...]:
    """Return the registered names, sorted, with those of installed packages."""
    return tuple(sorted({*_NETWORKS, *installed()}))


def choices() -> tuple[str, ...]:
    """Return the names that a person may choose for training: `names` without what Locum itself makes."""
    return tuple(name for name in names() if name not in _MADE)


def builder(name: str) -> Callable[..., nn.Module]:
    """The class or function that builds the network `name`.

    Raises NetworkError for an unknown name, with those to choose from, and for one that cannot be imported.
    """
    if name in _NETWORKS:
        found = _NETWORKS[name]
    elif name in installed():
        return _loaded(installed()[name])
    else:
        raise NetworkError(
            f"unknown network '{name}'; known: {', '.join(choices())}. One of another package has to be "
            f"installed here, with an entry point in {GROUP}"
        )
    if isinstance(found, str):
        module, attribute = found.split(":")
        found = _NETWORKS[name] = getattr(import_module(module), attribute)
    return found


def _loaded(entry: EntryPoint) -> Callable[..., nn.Module]:
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise NetworkError(
            f"network '{entry.name}' of {_package(entry)}: {entry.value} cannot be imported: {error}"
        ) from error
    if not callable(found):
        raise NetworkError(
            f"network '{entry.name}': expected a class or a function, found {entry.value} = {found!r}"
        )
    network: Callable[..., nn.Module] = found
    return network


def build(name: str, /, **arguments: Any) -> nn.Module:
    """Build the network `name` with PyTorch's default weights; `initialise` redraws them from a generator.

    Raises NetworkError for an unknown name (listing those to choose from) or arguments that do not fit.
    """
    network = builder(name)
    signature = inspect.signature(network)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise NetworkError(f"network '{name}': {error}; expected {signature}, found {arguments}") from error
    if (most := _most_parameters.get()) is not None:
        _check_count(name, network, arguments, *most)
    return network(**arguments)


@contextmanager
def at_most(parameters: int, rule: str) -> Iterator[None]:
    """Build no network of more parameters in this block, in which another party chooses it. `rule` says who
    set the bound.

    They are counted on torch's meta device first, so that `build` raises NetworkError before memory is taken.
    """
    token = _most_parameters.set((parameters, rule))
    try:
        yield
    finally:
        _most_parameters.reset(token)


def _check_count(
    name: str, network: Callable[..., nn.Module], arguments: Mapping[str, Any], most: int, rule: str
) -> None:
    try:
        with torch.device("meta"):
            count = sum(tensor.numel() for tensor in network(**arguments).state_dict().values())
    except RuntimeError as error:
        # A size beyond what torch can count.
        raise NetworkError(f"network '{name}': it cannot be built: {str(error)[:200]}") from error
    if count > most:
        raise NetworkError(f"network '{name}': expected at most {most} parameters ({rule}), found {count}")


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
