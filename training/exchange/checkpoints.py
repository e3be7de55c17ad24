"""Read the tensors of a .pt or .pth file with PyTorch's restricted unpickler."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from personalization.errors import StateError
from personalization.state import State, check_finite
from training.errors import ImportRefused
from training.weights.bounds import check_archive, check_tensors

MOST_BYTES: Final = 4 << 30
_MOST_NAMED = 3
_SCALAR: Final = np.float64(0).__reduce__()[0]
# nnU-Net's checkpoints log with NumPy's scalars. They are built from plain bytes; none can run code.
_SCALARS: list[Any] = [
    (_SCALAR, "numpy.core.multiarray.scalar"),
    (_SCALAR, "numpy._core.multiarray.scalar"),
    np.dtype,
    type(np.dtype("float64")),
    type(np.dtype("float32")),
    type(np.dtype("int64")),
]


def load(content: bytes, where: str) -> Any:
    """Read a checkpoint with `weights_only`: tensors, plain values and NumPy's scalars.

    Raises ImportRefused for TorchScript, a pickled module, or other code; for a file from before PyTorch 1.6;
    and for one that expands to too much.
    """
    try:
        members = check_archive(content)
    except ValueError as error:
        raise ImportRefused(f"{where}: {error}") from error
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ImportRefused(
            f"{where}: expected a file of torch.save (PyTorch 1.6 or newer), found other bytes: load it "
            "where it was "
            "made and save its state_dict() again"
        ) from error
    if any(
        "/code/" in f"/{member.filename}" or member.filename.endswith("constants.pkl") for member in members
    ):
        raise ImportRefused(
            f"{where}: TorchScript has code, which would run here: ask for the state dict (model.pt), or "
            "export the "
            "network to onnx where it was made and use `import onnx`"
        )
    try:
        with torch.serialization.safe_globals(_SCALARS):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        reason = " ".join(str(error).split())[:300]
        raise ImportRefused(
            f"{where}: expected tensors alone (weights_only), found something else: {reason}. Load it "
            "where it was "
            "made and save its state_dict()"
        ) from error


def state_of(found: Any, size: int, where: str) -> State:
    """The state dict of a checkpoint of `size` bytes: bare, or under `model`, `state_dict` or
    `network_weights`, or the only mapping of tensors in it.

    Raises ImportRefused where there is none, or several, and for tensors that are not dense or have too many
    numbers.
    """
    for key in ("model", "state_dict", "network_weights"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if isinstance(found, Mapping) and not _is_state(found):
        states = [key for key, value in found.items() if _is_state(value)]
        if len(states) > 1:
            raise ImportRefused(
                f"{where}: expected one state dict, found several, under "
                f"{', '.join(str(key)[:64] for key in states[:_MOST_NAMED])}: save the one that answers "
                "alone"
            )
        found = found[states[0]] if states else found
    if not _is_state(found):
        raise ImportRefused(
            f"{where}: expected a state dict (tensors by name), bare or under 'model' or 'state_dict', found "
            f"{_described(found)}"
        )
    state = {str(name): tensor for name, tensor in found.items()}
    try:
        check_tensors(state, size)
    except ValueError as error:
        raise ImportRefused(f"{where}: {error}") from error
    return state


def _is_state(found: Any) -> bool:
    return (
        isinstance(found, Mapping)
        and bool(found)
        and all(isinstance(each, Tensor) for each in found.values())
    )


def by_names(state: Mapping[str, Tensor], wanted: Collection[str], where: str) -> State:
    """Find the `wanted` tensors by their names behind a prefix, such as `module.` of DataParallel,
    `net.` of a class around the network or `_orig_mod.` of torch.compile, without it. A state without them
    is returned as it is.

    Raises ImportRefused for several such prefixes, as of a student and its teacher.
    """
    first = next(iter(wanted))
    prefixes = [
        name.removesuffix(first)
        for name in state
        if name.endswith(first) and all(name.removesuffix(first) + each in state for each in wanted)
    ]
    if "" in prefixes or not prefixes:
        return dict(state)
    if len(prefixes) > 1:
        raise ImportRefused(
            f"{where}: expected the weights of one network, found those of several, called "
            f"{', '.join(f'{prefix[:64]}…' for prefix in prefixes[:_MOST_NAMED])}: save the one that answers "
            "alone"
        )
    (prefix,) = prefixes
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def check_fits(network: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Compare a state with a network, which may be on torch's meta device, by names and shapes.

    Raises ImportRefused that names the first tensors that are missing, left over or of another shape.
    """
    wanted = network.state_dict()
    missing = [name for name in wanted if name not in state]
    if len(missing) == len(wanted):
        raise ImportRefused(
            f"{where}: the weights do not fit {type(network).__name__}: without any of "
            f"{', '.join(missing[:_MOST_NAMED])} and so on, with "
            f"{', '.join(name[:160] for name in [*state][:_MOST_NAMED])} and so on: they are of another "
            "class"
        )
    strange = [name for name in state if name not in wanted]
    shapes = [
        f"{name} (expected {list(wanted[name].shape)}, found {list(state[name].shape)})"
        for name in wanted
        if name in state and state[name].shape != wanted[name].shape
    ]
    for heading, names in (("without", missing), ("has besides", strange), ("of another shape", shapes)):
        if names:
            rest = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            raise ImportRefused(
                f"{where}: the weights do not fit {type(network).__name__}: {heading} "
                f"{', '.join(each[:160] for each in names[:_MOST_NAMED])}{rest}. Check the network's "
                "arguments"
            )


def fill(network: nn.Module, state: Mapping[str, Tensor], where: str) -> State:
    """Load a state into a network, strictly, and return the network's own state.

    Raises ImportRefused as `check_fits`, and for values that are not finite.
    """
    check_fits(network, state, where)
    try:
        check_finite({name: tensor for name, tensor in state.items() if tensor.is_floating_point()}, where)
    except StateError as error:
        raise ImportRefused(str(error)) from error
    network.load_state_dict(dict(state))
    return {name: tensor.detach().clone().contiguous() for name, tensor in network.state_dict().items()}


def _described(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"a mapping with {', '.join(str(key)[:32] for key in list(found)[:5]) or 'nothing'}"
    return type(found).__name__
