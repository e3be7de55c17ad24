"""Tensors between processes and in checkpoints: safetensors files, rewritten in place.

Every round writes the same files again. Writing over a file's existing pages costs a memory copy; a new file
(as the safetensors package writes it: first all the bytes in memory, then fresh pages) costs five times that,
which a round with little training would feel. Reading tensor by tensor has its price too. The format is the
package's own.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

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
_NAMES = {name: dtype for dtype, name in _TYPES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8  # views of a buffer need their type's alignment
# Where it exists, the cheaper call: overwritten pages need no new metadata.
_sync = getattr(os, "fdatasync", os.fsync)
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
    entries: dict[str, dict[str, Any]] = {}
    buffers: list[memoryview | bytes] = []
    offset = 0
    # The widest types first, so that each tensor is aligned; the header keeps the state's own order.
    for name in sorted(state, key=lambda name: -state[name].element_size()):
        tensor = state[name]
        if tensor.dtype not in _TYPES:
            raise TrainingError(
                f"{path.name}: tensor '{name}' has type {tensor.dtype}, which cannot be written"
            )
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        entries[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + flat.numel()],
        }
        offset += flat.numel()
        if flat.numel():
            buffers.append(flat.numpy().data)
    header: dict[str, Any] = {"__metadata__": {"facts": json.dumps(facts)}} if facts else {}
    header |= {name: entries[name] for name in state}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    _write_over(path, [_LENGTH.pack(len(encoded)), encoded, *buffers], durable)


def read_tensors(path: Path, *, copy: bool = True) -> tuple[State, dict[str, Any]]:
    """Tensors and facts of a file. Without `copy` the tensors are views of it: they change when it does.

    Raises TrainingError for a file that is cut short.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            start = _LENGTH.size + _LENGTH.unpack(file.read(_LENGTH.size))[0]
            header: dict[str, Any] = json.loads(file.read(start - _LENGTH.size))
        except (struct.error, ValueError) as error:
            raise TrainingError(f"{path} is damaged; restore the run's folder, or start anew") from error
        facts = json.loads(header.pop("__metadata__", {}).get("facts", "{}"))
        if size != start + max((entry["data_offsets"][1] for entry in header.values()), default=0):
            raise TrainingError(f"{path} is cut short; restore the run's folder, or start anew")
        if copy:
            buffer = torch.empty(size - start, dtype=torch.uint8)
            file.readinto(buffer.numpy().data)
        else:
            # A private mapping is writable, as torch wants it, and never written to.
            mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
            buffer = torch.frombuffer(mapped, dtype=torch.uint8)[start:]
    return {name: _view(buffer, entry) for name, entry in header.items()}, facts


def _view(buffer: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    begin, end = entry["data_offsets"]
    return buffer[begin:end].view(_NAMES[entry["dtype"]]).reshape(entry["shape"])


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
            _sync(descriptor)
    finally:
        os.close(descriptor)
