"""Methods by the name a person gives on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from model_store.task import Task, TaskKind
from training.algorithm import Algorithm
from training.config import MethodConfig
from training.errors import ConfigurationError

Built = TypeVar("Built", bound=type[Algorithm[Any]])
_METHODS: dict[str, Method] = {}


@dataclass(frozen=True)
class Method:
    """A registered method: how it is configured, how it is made for a task, and for which kinds of task."""

    name: str
    config: type[MethodConfig]
    build: Callable[[Any, Task], Algorithm[Any]]
    kinds: tuple[TaskKind, ...]


def register(
    name: str, config: type[MethodConfig], kinds: tuple[TaskKind, ...] = ("segmentation",)
) -> Callable[[Built], Built]:
    """Class decorator: make an algorithm, built as `Class(config, task)`, runnable under `name`."""

    def enter(algorithm: Built) -> Built:
        _METHODS[name] = Method(name, config, algorithm, kinds)
        return algorithm

    return enter


def methods() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_METHODS))


def method(name: str) -> Method:
    """A method by name. Raises ConfigurationError listing the known ones."""
    if name not in _METHODS:
        raise ConfigurationError(f"unknown method '{name}'", [f"known methods: {', '.join(methods())}"])
    return _METHODS[name]
