"""A package with methods, as pip leaves it in a folder of `sys.path`, and its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from training.methods import registry
from training.methods.installed import installed

MODULE = """
from dataclasses import replace

from pydantic import Field
from training.choices.fedavg import FedAvgConfig
from training.methods.fedavg import FedAvg
from training.methods.registry import register


class ShrinkConfig(FedAvgConfig):
    keep: float = Field(0.99, gt=0, le=1)


@register("acme.shrink", ShrinkConfig)
class Shrink(FedAvg):
    def update(self, network, here):
        found = super().update(network, here)
        keep = self.config.keep
        weights = {n: t * keep if t.is_floating_point() else t for n, t in found.weights.items()}
        return replace(found, weights=weights)


@register("acme.broken", FedAvgConfig)
class Broken(FedAvg):
    def update(self, network, here):
        raise ArithmeticError("Doe_John has no such gradient")


@register("acme.refuses", FedAvgConfig)
class Refuses(FedAvg):
    def average(self, context, server, result):
        raise ValueError("the mean is not there yet")


def local():
    @register("acme.local", FedAvgConfig)
    class Local(FedAvg):
        pass

    return Local


Local = local()


class Unregistered(FedAvg):
    pass
"""
LINES = """
acme.shrink = acme_methods:Shrink
acme.broken = acme_methods:Broken
acme.refuses = acme_methods:Refuses
acme.local = acme_methods:Local
"""

Install = Callable[..., None]


@contextmanager
def acme_methods(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Yield a function that writes the package, in a version and with lines of entry points."""
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))

    def package(version: str = "1.2", lines: str = LINES, name: str = "acme-methods") -> None:
        (root / "acme_methods.py").write_text(MODULE)
        info = root / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[locum.methods]\n{lines}\n")
        installed.cache_clear()

    try:
        yield package
    finally:
        installed.cache_clear()
        sys.modules.pop("acme_methods", None)
        registered: dict[str, Any] = registry._REGISTERED
        for name in [name for name in registered if name.startswith("acme.")]:
            del registered[name]
