"""Read and write safetensors files in place, for checkpoints and for tensors between processes.

Every round writes the same files again. Overwriting a file's existing pages costs one memory copy. A new
file, as the safetensors package writes it (all bytes in memory first, then fresh pages), costs five times
that, which is noticeable in a round with little training. Reading tensor by tensor is also slow. The file
format is that of the safetensors package.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from model_store.durable import naming, sync_folder
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
# fdatasync is cheaper where it exists: overwritten pages need no new metadata.
_sync = getattr(os, "fdatasync", os.fsync)
_LONGEST_HEADER = 16 * 2**20
_MOST_AXES = 16
_MOST_VALUES = 2**48
_FACTS = "__metadata__"  # the format's name for what is no tensor
_MOST_BUFFERS = 512  # POSIX guarantees at least 16 for writev; Linux and macOS accept 1024


def size_of(state: Mapping[str, torch.Tensor]) -> int:
    """Count the bytes of the tensors without the file header, as reported for a method's traffic."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def write_tensors(
    path: Path,
    state: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any] | None = None,
    *,
    durable: bool = False,
) -> None:
    """Overwrite `path` with tensors and small JSON facts. Not atomic: never overwrite the only copy.

    `durable` waits until the data is on disk. Raises TrainingError for a tensor type the format cannot hold.
    """
    for name, tensor in state.items():
        if tensor.dtype not in _TYPES:
            raise TrainingError(
                f"{path.name}: tensor '{name}' has type {tensor.dtype}, which cannot be written"
            )
    order, header = _layout(tuple((name, tensor.dtype, tensor.shape) for name, tensor in state.items()))
    if facts:
        header = f'{{"{_FACTS}":{json.dumps({"facts": json.dumps(facts)})}{"," if state else ""}{header[1:]}'
    encoded = header.encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    buffers = [_bytes_of(state[name]) for name in order if state[name].numel()]
    _write_over(path, [memoryview(_LENGTH.pack(len(encoded))), memoryview(encoded), *buffers], durable)


@lru_cache(maxsize=32)  # the same few kinds of state are written every round
def _layout(tensors: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> tuple[tuple[str, ...], str]:
    """Return the names in byte order, and the header without facts in the state's own order."""
    offset = 0
    entries: dict[str, dict[str, Any]] = {}
    # The widest types first, so that each tensor is aligned.
    by_width = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)
    for name, dtype, shape in by_width:
        end = offset + shape.numel() * dtype.itemsize
        entries[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps({name: entries[name] for name, _, _ in tensors})
    return tuple(name for name, _, _ in by_width), header


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach()
    if plain.device.type != "cpu" or not plain.is_contiguous():
        plain = plain.cpu().contiguous()
    if plain.dtype is torch.bfloat16:  # the one type that numpy does not have
        plain = plain.view(torch.int16)
    return plain.numpy().data


def read_tensors(path: Path, *, copy: bool = True) -> tuple[State, dict[str, Any]]:
    """Read the tensors and facts of a file. Without `copy` the tensors are views that change with the file.

    Raises TrainingError for a damaged or truncated file.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            start = _LENGTH.size + _LENGTH.unpack(file.read(_LENGTH.size))[0]
            header = _parsed(file.read(start - _LENGTH.size))
        except (struct.error, ValueError) as error:
            raise TrainingError(f"{path} is damaged; restore the run's folder, or start again") from error
        if size != start + header.size:
            raise TrainingError(f"{path} is cut short; restore the run's folder, or start again")
        if copy:
            buffer = torch.empty(size - start, dtype=torch.uint8)
            file.readinto(buffer.numpy().data)
        else:
            # A private mapping is writable, as torch requires; nothing writes to it.
            mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
            buffer = torch.frombuffer(mapped, dtype=torch.uint8)[start:]
    views: State = {}
    for run in header.runs:
        # Tensors of one type are contiguous: one split per run is faster than three calls per tensor.
        parts = torch.split(buffer[run.begin : run.end].view(run.dtype), list(run.lengths))
        views |= {
            name: part.view(shape) for name, part, shape in zip(run.names, parts, run.shapes, strict=True)
        }
    return {name: views[name] for name in header.names}, json.loads(header.facts)


def check_tensors(path: Path) -> int:
    """Check the header of a file from another machine before a tensor is read. Returns the tensors' bytes.

    Every tensor must have a name of printable ASCII, since errors show it, a known type and a shape that
    fills its bytes. The tensors must fill the file without gaps, aligned to their types, and there must be no
    facts. Raises TrainingError.
    """

    def refuse(why: str) -> TrainingError:
        return TrainingError(f"not a file of tensors: {why}")

    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_LENGTH.size)
        length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else 0
        if not 2 <= length <= min(_LONGEST_HEADER, size - _LENGTH.size):
            raise refuse(f"expected a header of 2 to {_LONGEST_HEADER} bytes, found {length}")
        if length % _ALIGNMENT:
            raise refuse(f"expected a header of a multiple of {_ALIGNMENT} bytes, found {length}")
        try:
            entries = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise refuse("the header is not JSON") from error
    if not isinstance(entries, dict):
        raise refuse("the header is not an object")
    placed: list[tuple[int, int]] = []
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
                axes = len(shape) <= _MOST_AXES and all(type(n) is int and n >= 0 for n in shape)
                # torch multiplies the axes of an empty tensor, too.
                counted = axes and math.prod(n or 1 for n in shape) < _MOST_VALUES
                width = _NAMES[dtype].itemsize if dtype in _NAMES else 0
                named = name.isascii() and name.isprintable() and name != _FACTS
                fits = width and begin % width == 0 and math.prod(shape) * width == end - begin
                if counted and named and fits and len(entry) == 3:
                    placed.append((begin, end))
                    continue
        raise refuse(f"tensor {name[:64]!a} is not described as the format requires")
    at = 0
    for begin, end in sorted(placed):
        if begin != at:
            raise refuse("tensors overlap, or leave a gap")
        at = end
    if size != _LENGTH.size + length + at:
        raise refuse(f"expected {_LENGTH.size + length + at} bytes, found {size}")
    return at


@dataclass(frozen=True)
class _Run:
    """Contiguous tensors of one type, from byte `begin` to byte `end`."""

    dtype: torch.dtype
    begin: int
    end: int
    names: tuple[str, ...]
    lengths: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Header:
    """A parsed header: tensor names in the state's own order, their byte ranges, and the facts as JSON."""

    names: tuple[str, ...]
    runs: tuple[_Run, ...]
    facts: str
    size: int


@lru_cache(maxsize=32)
def _parsed(content: bytes) -> _Header:
    """Parse a header. Raises ValueError if this module did not write it."""
    entries: dict[str, Any] = json.loads(content)
    facts = entries.pop(_FACTS, {}).get("facts", "{}")
    placed = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    runs = []
    end = 0
    for dtype, group in groupby(placed, key=lambda item: str(item[1]["dtype"])):
        members = list(group)
        begin, end = end, members[-1][1]["data_offsets"][1]
        shapes = tuple(tuple(entry["shape"]) for _, entry in members)
        lengths = tuple(math.prod(shape) for shape in shapes)
        if sum(lengths) * _NAMES[dtype].itemsize != end - begin:
            raise ValueError("tensors are not contiguous")
        runs.append(_Run(_NAMES[dtype], begin, end, tuple(name for name, _ in members), lengths, shapes))
    return _Header(tuple(entries), tuple(runs), facts, end)


def _write_over(path: Path, buffers: list[memoryview], durable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = durable and not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with naming(path):
            total = 0
            pending = list(buffers)
            while pending:
                written = os.writev(descriptor, pending[:_MOST_BUFFERS])
                total += written
                while pending and written >= pending[0].nbytes:
                    written -= pending.pop(0).nbytes
                if written:
                    pending[0] = pending[0].cast("B")[written:]
            os.ftruncate(descriptor, total)
            if durable:
                _sync(descriptor)
    finally:
        os.close(descriptor)
    if new:
        # Syncing a file does not sync its name, nor the name of a folder created for it.
        sync_folder(path.parent)
        sync_folder(path.parent.parent)
