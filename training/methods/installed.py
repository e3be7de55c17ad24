"""Methods of installed packages, as their entry points name them; nothing is imported."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from training.errors import ConfigurationError

# Entry points with methods of other packages: `NAME = "package.module:Class"`.
GROUP = "locum.methods"


@cache
def installed() -> Mapping[str, EntryPoint]:
    """Methods of installed packages by name. Raises ConfigurationError for a name that two packages have."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if (other := found.get(entry.name)) is not None:
            raise ConfigurationError(
                f"method '{entry.name}' of {package_of(entry)} cannot be used",
                [f"{package_of(other)} has one of this name; rename an entry point"],
            )
        found[entry.name] = entry
    return found


def origin_of(name: str) -> str | None:
    """Package and version of a method of an installed package; None for one of Locum's own."""
    entry = installed().get(name)
    return None if entry is None or entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def package_of(entry: EntryPoint) -> str:
    """The package of an entry point, in words."""
    return "an unknown package" if entry.dist is None else f"package {entry.dist.name}"
