"""Serialise checkpoints to one safetensors file: tensors, and other values as JSON in its header.

Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from safetensors import torch as safetensors_torch
from torch import Tensor

from personalization.state import State

_LENGTH_BYTES = 8


def to_bytes(parts: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> bytes:
    """Serialise tensors by part and name, and JSON facts. Equal checkpoints give equal bytes."""
    tensors = {
        f"{part}/{name}": tensor.detach().cpu().clone().contiguous()
        for part, state in parts.items()
        for name, tensor in sorted(state.items())
    }
    return safetensors_torch.save(tensors, {"facts": json.dumps(facts, sort_keys=True, allow_nan=False)})


def from_bytes(data: bytes, parts: Collection[str], format: str) -> tuple[dict[str, State], dict[str, Any]]:
    """Read the tensors and facts that `to_bytes` wrote; `format` is the expected value of that fact.

    Raises SafetensorError, ValueError, KeyError or TypeError for bytes that are not such a checkpoint.
    """
    tensors = safetensors_torch.load(data)
    facts = _facts(data)
    if facts["format"] != format:
        raise ValueError(f"expected format {format}, found {facts['format']}")
    states: dict[str, State] = {part: {} for part in parts}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        states[part][rest] = tensor
    return states, facts


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Compute the sha256 over names, types, shapes and values, sorted by name; equal on all devices."""
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        hashed.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        hashed.update(tensor.numpy().data)
    return hashed.hexdigest()


def _facts(data: bytes) -> dict[str, Any]:
    """Read the JSON in a safetensors header, which the package supports only for files."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    facts: dict[str, Any] = json.loads(header["__metadata__"]["facts"])
    return facts
