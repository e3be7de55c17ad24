"""Tensors between processes and in checkpoints: safetensors files, rewritten in place.

Every round writes the same files again. Writing over a file's existing pages costs a memory copy; a new file
(as the safetensors package writes it: first all the bytes in memory, then fresh pages) costs five times that,
which a round with little training would feel. The format is the package's, and it does the reading.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from training.algorithm import State
from training.errors import TrainingError

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_MOST_BUFFERS = 512  # POSIX promises writev at least 16, Linux and macOS take 1024


def size_of(state: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the tensors alone, which is what a method is charged for."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def write_tensors(
    path: Path,
    state: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any] | None = None,
    *,
    durable: bool = False,
) -> None:
    """Write tensors (and small JSON facts) over what `path` held: not atomic, so never over the only copy.

    `durable` waits until the disk has it. Raises TrainingError for a tensor type the format cannot hold.
    """
    header: dict[str, Any] = {"__metadata__": {"facts": json.dumps(facts)}} if facts else {}
    buffers: list[memoryview | bytes] = []
    offset = 0
    for name, tensor in state.items():
        if tensor.dtype not in _TYPES:
            raise TrainingError(
                f"{path.name}: tensor '{name}' has type {tensor.dtype}, which cannot be written"
            )
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + flat.numel()],
        }
        offset += flat.numel()
        if flat.numel():
            buffers.append(flat.numpy().data)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    _write_over(path, [struct.pack("<Q", len(encoded)), encoded, *buffers], durable)


def read_tensors(path: Path, *, copy: bool = True) -> tuple[State, dict[str, Any]]:
    """Tensors and facts of a file. Without `copy` the tensors are views of it: they change when it does."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        state: State = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return ({name: tensor.clone() for name, tensor in state.items()} if copy else state), facts


def _write_over(path: Path, buffers: list[memoryview | bytes], durable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        total = 0
        pending = [memoryview(buffer) for buffer in buffers]
        while pending:
            written = os.writev(descriptor, pending[:_MOST_BUFFERS])
            total += written
            while pending and written >= len(pending[0]):
                written -= len(pending.pop(0))
            if written:
                pending[0] = pending[0][written:]
        os.ftruncate(descriptor, total)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
