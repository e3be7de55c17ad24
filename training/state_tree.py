"""Several states in one flat dictionary, each under its own prefix."""

from __future__ import annotations

from collections.abc import Mapping

from training.algorithm import State

_SEPARATOR = "/"  # appears in no parameter name and in no site's (a site is a folder)


def join(parts: Mapping[str, State]) -> State:
    """{"global": {"w": t}} -> {"global/w": t}; prefixes may themselves hold separators."""
    return {f"{prefix}{_SEPARATOR}{name}": t for prefix, state in parts.items() for name, t in state.items()}


def part(tensors: State, prefix: str) -> State:
    """The state under a prefix; empty when there is none. The tensors are the same objects."""
    start = prefix + _SEPARATOR
    return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
