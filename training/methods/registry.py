"""Methods by the name a person gives on the command line.

The modules of `training.methods` are found, not listed: a new file with a class under `@register` is enough.
A package that is installed adds its own by an entry point of the group `locum.methods`, which names a class
under `@register`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from model_store.manifest import NetworkSpec
from model_store.task import Task, TaskKind
from training import methods as package
from training.algorithm import Algorithm, State
from training.config import MethodConfig
from training.data.cases import Site
from training.errors import ConfigurationError
from training.local.networks import network_of
from training.methods.installed import GROUP, installed, package_of

Built = TypeVar("Built", bound=type[Algorithm])
_REGISTERED: dict[str, Method] = {}


@dataclass(frozen=True)
class Panel:
    """A section of the report that a method has beyond curves and bytes, and the section it comes after.

    `training.report.NAME` has a function `content(record, publication)`, which gives what the template
    `NAME.html` shows as `NAME`, or None where there is nothing to show. A report imports it when it is drawn.
    """

    name: str
    after: Literal["rounds", "traffic"] = "rounds"


def plain_network(config: MethodConfig, task: Task, spec: NetworkSpec, state: State) -> nn.Module:  # noqa: ARG001
    """A published draft as a network on the CPU: what its `spec` builds, with its weights."""
    return network_of(spec, state, torch.device("cpu"))


@dataclass(frozen=True)
class Method:
    """A registered method: how it is configured, how it is built for a task, and what is special to it.

    kinds: the kinds of task it is for.
    panels: its own sections of the report.
    network: (config, task, draft's network, draft's weights) -> the network that a site's overlays show.
    attention: (that network, images [N, C, H, W]) -> [N, sources], each image's attention to the draft's
        `sources`, for a method with such drafts.
    refused: why it cannot be trained on some of these, such as `volumes`, by the name of `Data`.
    load: (site, task) -> the data of its steps; without it, the images that the kind of task needs.
    listed: whether a person may ask for it by name.
    """

    name: str
    config: type[MethodConfig]
    build: Callable[[Any, Task], Algorithm]
    kinds: tuple[TaskKind, ...]
    panels: tuple[Panel, ...]
    network: Callable[[Any, Task, NetworkSpec, State], nn.Module]
    attention: Callable[[Any, Tensor], Tensor] | None
    refused: Mapping[str, str] = field(default_factory=dict)
    load: Callable[[Site[Any], Task], Any] | None = None
    listed: bool = True


def register(
    name: str,
    config: type[MethodConfig],
    kinds: tuple[TaskKind, ...] = ("segmentation",),
    *,
    panels: tuple[Panel, ...] = (),
    network: Callable[[Any, Task, NetworkSpec, State], nn.Module] = plain_network,
    attention: Callable[[Any, Tensor], Tensor] | None = None,
    refused: Mapping[str, str] | None = None,
    load: Callable[[Site[Any], Task], Any] | None = None,
    listed: bool = True,
) -> Callable[[Built], Built]:
    """Class decorator: make an algorithm, built as `Class(config, task)`, runnable under `name`.

    The other arguments are those of `Method`. Raises ValueError for a name that another class has.
    """

    def enter(algorithm: Built) -> Built:
        if name in _REGISTERED:
            raise ValueError(
                f"method '{name}': registered by {_REGISTERED[name].build} and by {algorithm}; rename one"
            )
        _REGISTERED[name] = Method(
            name, config, algorithm, kinds, panels, network, attention, refused or {}, load, listed
        )
        return algorithm

    return enter


@cache
def _found() -> Mapping[str, Method]:
    """All methods, once every module of the package is imported."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        import_module(module.name)
    return _REGISTERED


def methods() -> tuple[str, ...]:
    """The registered names that are listed, and those of installed packages, sorted."""
    own = (name for name, found in _found().items() if found.listed)
    return tuple(sorted({*own, *installed()}))


def method(name: str) -> Method:
    """A method by name.

    Raises ConfigurationError for an unknown name, with the nearest one and the known ones, and for a method
    of an installed package that cannot be used, with the package.
    """
    if (entry := installed().get(name)) is not None:
        return _loaded(entry)
    if name not in _found():
        near = get_close_matches(name.lower(), methods(), n=1)
        guess = f": did you mean '{near[0]}'?" if near else ""
        raise ConfigurationError(
            f"unknown method '{name}'{guess}", [f"known methods: {', '.join(methods())}"]
        )
    return _found()[name]


def fitting(fits: Callable[[Method], bool]) -> str:
    """The names of the methods that fit, for a message, without those of packages that cannot be used."""
    found = []
    for name in methods():
        try:
            chosen = method(name)
        except ConfigurationError:
            continue
        found += [name] if fits(chosen) else []
    return ", ".join(found)


def _loaded(entry: EntryPoint) -> Method:
    """The method of an installed package. Raises ConfigurationError."""
    heading = f"method '{entry.name}' of {package_of(entry)} cannot be used"
    own = _found().get(entry.name)
    if own is not None and own.build.__module__.startswith(f"{package.__name__}."):
        raise ConfigurationError(
            heading, ["Locum has a method of this name; rename its entry point, and in `@register`"]
        )
    try:
        loaded = entry.load()
    except Exception as error:
        # Whatever the package raises while it is imported.
        problem = f"{entry.value} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigurationError(heading, [problem]) from error
    found = _REGISTERED.get(entry.name)
    if found is None or found.build is not loaded:
        raise ConfigurationError(
            heading,
            [
                f"{entry.value} is not registered under this name; put @register('{entry.name}', its "
                f"configuration) before the class that the entry point of {GROUP} names"
            ],
        )
    return found
