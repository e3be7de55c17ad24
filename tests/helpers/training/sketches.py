"""Compare states and graphs that were made on different processors.

Kernels are chosen by the processor's model, and sum in orders of their own: bits are equal only where a
`probe` gives the recorded ones. Elsewhere two numbers of each tensor are compared, with room for rounding:
its norm, and the sum of its elements with random signs. What a graph is beside its numbers is compared
exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from personalization.export import to_onnx
from personalization.networks.registry import build, initialise
from personalization.state import from_safetensors, to_safetensors
from training.engine.seeds import generator

# A tensor's two numbers may be a fiftieth of its norm away, and so much more where it is next to nothing.
# Between instructions of 128, 256 and 512 bits most are a hundredth of that away, and none more than about
# half of it. A tensor near zero is mostly what rounding left, at least on processors with AMX. With a
# learning rate a tenth larger, some tensor of each artefact is twice as far as allowed.
ROOM, LEAST = 2e-2, 3e-3

NETWORKS: dict[str, dict[str, Any]] = {
    "unet": {"in_channels": 1, "classes": 2, "width": 2},
    "resnet18": {"in_channels": 1, "classes": 2, "width": 2},
}
# By the order of the tensors' names.
Sketch = list[tuple[float, float]]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sketch(name: str, content: bytes) -> Sketch:
    """The norm and the signed sum of each tensor of a state or graph."""
    if name.endswith(".onnx"):
        arrays = {key: numpy_helper.to_array(each) for key, each in _tensors(onnx.load_from_string(content))}
        tensors: Mapping[str, Tensor] = {key: torch.from_numpy(each.copy()) for key, each in arrays.items()}
    else:
        tensors = from_safetensors(content)
    return [_numbers(tensors[key].double().flatten()) for key in sorted(tensors)]


def structure(name: str, content: bytes) -> str:
    """The digest of all but the tensors' numbers: their names, types and shapes; the nodes of a graph."""
    if name.endswith(".onnx"):
        graph = onnx.load_from_string(content)
        for _, tensor in _tensors(graph):
            blank = np.zeros_like(numpy_helper.to_array(tensor))
            tensor.CopyFrom(numpy_helper.from_array(blank, tensor.name))
        return digest(graph.SerializeToString(deterministic=True))
    state = from_safetensors(content)
    return digest(repr([(key, state[key].dtype, [*state[key].shape]) for key in sorted(state)]).encode())


def apart(found: Sketch, recorded: Sketch) -> float:
    """The largest difference, as a share of the room of its tensor: above 1 is too far."""
    return max(
        abs(mine - other) / (ROOM * theirs[0] + LEAST)
        for ours, theirs in zip(found, recorded, strict=True)
        for mine, other in zip(ours, theirs, strict=True)
    )


def probe() -> dict[str, str]:
    """The digests of what the kernels make that artefacts are made by, on one thread."""
    draw = generator(0, "probe")
    images, numbers = torch.randn(8, 3, 16, 16, generator=draw), torch.randn(4096, generator=draw)
    found = {
        "matrix product": numbers.view(64, 64) @ numbers.view(64, 64).T,
        "softmax": torch.softmax(numbers.view(64, 64), 1),
        "exp": numbers.exp(),
        "sqrt": numbers.abs().sqrt(),
        "numpy": torch.from_numpy(np.exp(numbers.numpy()) + np.sqrt(np.abs(numbers.numpy()))),
    }
    for width in (2, 4, 16):
        weight = torch.randn(width, 3, 3, 3, generator=draw)
        found[f"convolution to {width}"] = functional.conv2d(images, weight, padding=1)
        transposed = torch.randn(3, width, 2, 2, generator=draw)
        found[f"transposed convolution to {width}"] = functional.conv_transpose2d(
            images, transposed, stride=2
        )
    digests = {name: digest(value.numpy().tobytes()) for name, value in found.items()}
    for name, arguments in NETWORKS.items():
        network = build(name, **arguments).train()
        initialise(network, draw)
        for optimiser in (torch.optim.SGD, torch.optim.Adam):
            _step(network, optimiser(network.parameters(), lr=1e-2), images[:, :1])
        digests[f"training step of {name}"] = digest(to_safetensors(network.state_dict()))
        digests[f"graph of {name}"] = digest(to_onnx(network.eval(), 1, (16, 16)))
    return digests


def _step(network: nn.Module, optimiser: torch.optim.Optimizer, images: Tensor) -> None:
    optimiser.zero_grad()
    logits = network(images)
    functional.cross_entropy(
        logits, torch.zeros(logits.shape[0], *logits.shape[2:], dtype=torch.long)
    ).backward()
    optimiser.step()


def _numbers(values: Tensor) -> tuple[float, float]:
    signs = 2 * torch.randint(2, values.shape, generator=generator(0, "signs")) - 1
    return float(f"{values.norm():.4g}"), float(f"{(signs * values).sum():.4g}")


def _tensors(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Those of floating-point numbers, by name: other constants are shapes and axes."""
    named = [(each.name, each) for each in model.graph.initializer]
    for node in model.graph.node:
        named += [(f"{node.output[0]} {each.name}", each.t) for each in node.attribute if each.HasField("t")]
    return ((name, each) for name, each in named if numpy_helper.to_array(each).dtype.kind == "f")
