"""Graphs for tests: of versions that no test runs, and hostile ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper

from model_store.artefact import DIGEST_FILE, MANIFEST
from model_store.digest import sha256
from model_store.manifest import AnyManifest, FileEntry

SIDE = 32


def graph_of(text: str) -> bytes:
    """Make an onnx file of nothing but this text (`doc_string`); without text it is empty."""
    return to_bytes(onnx.ModelProto(doc_string=text or None))


def to_bytes(model: onnx.ModelProto) -> bytes:
    content: bytes = model.SerializeToString()
    return content


def network_of(
    nodes: Sequence[NodeProto], tensors: Sequence[TensorProto] = (), **more: Any
) -> onnx.ModelProto:
    """A model of nodes that make `shown` [1, 2, SIDE, SIDE] or alike, which is added to the image.

    Its answer is softmax(image + shown).
    """
    outside = [
        *nodes,
        helper.make_node("Add", ["image", "shown"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    graph = helper.make_graph(
        outside,
        "g",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["B", 1, SIDE, SIDE])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["B", 2, SIDE, SIDE])],
        tensors,
        **more,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def external(location: str, length: int, name: str = "stolen") -> TensorProto:
    """A tensor uint8 [length] of which the bytes are the first ones of another file."""
    tensor = TensorProto(
        name=name, data_type=TensorProto.UINT8, dims=[length], data_location=TensorProto.EXTERNAL
    )
    for key, value in {"location": location, "offset": "0", "length": str(length)}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def spying_graph(location: str) -> bytes:
    """A network that answers the first 128 bytes of a file as the bits of its mask, 1024 pixels."""
    bits = helper.make_tensor("bits", TensorProto.FLOAT, [8], [128, 64, 32, 16, 8, 4, 2, 1])
    nodes = [
        helper.make_node("Cast", ["stolen"], ["bytes"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["bytes", "column"], ["rows"]),
        helper.make_node("Div", ["rows", "bits"], ["shifted"]),
        helper.make_node("Floor", ["shifted"], ["whole"]),
        helper.make_node("Div", ["whole", "two"], ["half"]),
        helper.make_node("Floor", ["half"], ["floor"]),
        helper.make_node("Mul", ["floor", "two"], ["even"]),
        helper.make_node("Sub", ["whole", "even"], ["bit"]),
        helper.make_node("Mul", ["bit", "much"], ["loud"]),
        helper.make_node("Sub", ["loud", "half_of_much"], ["signed"]),
        helper.make_node("Reshape", ["signed", "square"], ["map"]),
        helper.make_node("Pad", ["map", "pads"], ["shown"]),
    ]
    tensors = [
        external(location, SIDE * SIDE // 8),
        bits,
        helper.make_tensor("column", TensorProto.INT64, [2], [SIDE * SIDE // 8, 1]),
        helper.make_tensor("two", TensorProto.FLOAT, [], [2]),
        helper.make_tensor("much", TensorProto.FLOAT, [], [1000]),
        helper.make_tensor("half_of_much", TensorProto.FLOAT, [], [500]),
        helper.make_tensor("square", TensorProto.INT64, [4], [1, 1, SIDE, SIDE]),
        # A first class of zeros.
        helper.make_tensor("pads", TensorProto.INT64, [8], [0, 1, 0, 0, 0, 0, 0, 0]),
    ]
    return to_bytes(network_of(nodes, tensors))


def endless_graph() -> bytes:
    """A network with a loop that does not end."""
    value = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Mul", ["x", "x"], ["y"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            *value,
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
        ],
    )
    tensors = [
        helper.make_tensor("most", TensorProto.INT64, [], [2**62]),
        helper.make_tensor("true", TensorProto.BOOL, [], [True]),
    ]
    return to_bytes(
        network_of([helper.make_node("Loop", ["most", "true", "image"], ["shown"], body=body)], tensors)
    )


def growing_graph(values: int) -> bytes:
    """A network that needs `values` float32 values at once, by its image, so that nothing is known before."""
    nodes = [
        helper.make_node("ReduceMax", ["image"], ["most"], keepdims=0),
        helper.make_node("Expand", ["most", "many"], ["big"]),
        helper.make_node("ReduceMax", ["big"], ["shown"], keepdims=0),
    ]
    return to_bytes(network_of(nodes, [helper.make_tensor("many", TensorProto.INT64, [1], [values])]))


def unfolding_graph(values: int) -> bytes:
    """A network that needs `values` float32 values at once, which are known without its image."""
    nodes = [
        helper.make_node("ConstantOfShape", ["many"], ["big"]),
        helper.make_node("ReduceMax", ["big"], ["shown"], keepdims=0),
    ]
    return to_bytes(network_of(nodes, [helper.make_tensor("many", TensorProto.INT64, [1], [values])]))


def subgraph_of(*tensors: TensorProto) -> GraphProto:
    """A subgraph with these initializers."""
    output = helper.make_tensor_value_info("out", TensorProto.UINT8, None)
    return helper.make_graph([], "inner", [], [output], tensors)


def plant(root: Path, manifest: AnyManifest, files: Mapping[str, bytes]) -> None:
    """Write a version into a store's folder as an attacker does: with every digest right, past all checks."""
    entries = {name: FileEntry(size=len(data), sha256=sha256(data)) for name, data in files.items()}
    content = manifest.model_copy(update={"files": entries}).to_bytes()
    folder = root / manifest.name / "1"
    folder.mkdir(parents=True)
    for name, data in {**files, MANIFEST: content, DIGEST_FILE: sha256(content).encode()}.items():
        (folder / name).write_bytes(data)
