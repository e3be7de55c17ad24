"""What a served graph (an onnx file) may hold: nothing outside of its own bytes, and known operators.

A graph is input like a scan: anyone who can write to the store can make one. onnxruntime reads files that a
graph names, runs loops without an end, and expands functions without a bound. A graph with any of these is
refused when it is published, opened and loaded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from model_store.errors import GraphRefused

if TYPE_CHECKING:
    from onnx import ModelProto

SUFFIX: Final = ".onnx"

# Of onnx's own domain.
_EXPORTED = """
    Add And ArgMax AveragePool BatchNormalization Cast Clip Concat Constant ConstantOfShape Conv ConvTranspose
    Div Equal Erf Exp Expand Gather GatherElements Gemm Greater Identity InstanceNormalization
    LayerNormalization LeakyRelu Less Log MatMul MaxPool Mul Neg Pad Pow ReduceL2 ReduceMax ReduceMean
    ReduceMin ReduceSum Relu Reshape Shape Sigmoid Slice Softmax Split Sqrt Sub TopK Transpose Unsqueeze Where
"""
_IMPORTED = "Elu Flatten GlobalAveragePool PRelu Resize Squeeze Tile"
_FURTHER = """
    Abs Ceil DepthToSpace Einsum Floor Gelu GlobalMaxPool GreaterOrEqual GroupNormalization HardSigmoid
    HardSwish LessOrEqual LogSoftmax Max Mean Min Mish Not Or Range Reciprocal ReduceProd Round Selu Softplus
    Sum Tanh
"""
# Operators in the graphs that Locum exports.
EXPORTED: Final = frozenset(_EXPORTED.split())
# Those that MONAI's networks have besides, by `torch.onnx.export`.
IMPORTED: Final = frozenset(_IMPORTED.split())
# Those that a graph in int8 has besides.
QUANTISED: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})
# What other networks of their kind have: functions of their inputs alone, without subgraphs.
FURTHER: Final = frozenset(_FURTHER.split())
# onnxruntime reads a file that such a node names.
_READS_FILES = "EPContext"
_OWN_DOMAINS = ("", "ai.onnx")
# onnxruntime can take options of a session from here.
_OPTIONS_IN_METADATA = "ort_config"
_MOST_NAMED = 5
# MONAI's largest networks have some thousand; onnxruntime takes seconds and memory for each ten thousand.
MOST_NODES: Final = 20_000
_OPERATOR = re.compile(r"([A-Za-z0-9_.]+:)?[A-Za-z0-9_]+")


def operators_of(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """Read operators that are separated by commas: `Loop`, or with its domain `com.microsoft:FusedConv`.

    Raises ValueError for a wrong name, and for an operator that reads files.
    """
    parts = text.split(",") if isinstance(text, str) else text
    found = tuple(sorted({part.strip() for part in parts if part.strip()}))
    for operator in found:
        if not _OPERATOR.fullmatch(operator):
            raise ValueError(f"expected OPERATOR or DOMAIN:OPERATOR, by commas, found {operator[:64]!r}")
        if operator.rpartition(":")[2] == _READS_FILES:
            raise ValueError(f"{operator} reads files, and cannot be allowed")
    return found


def check_graph(content: bytes, where: str, operators: Iterable[str] = ()) -> ModelProto:
    """Parse a graph that will run: complete in itself, without operators besides the allowed ones.

    Args:
        content: bytes of an onnx file.
        where: names it in the error.
        operators: allowed beyond `EXPORTED`, `IMPORTED`, `QUANTISED` and `FURTHER`.

    Raises:
        GraphRefused: as `parse_graph`, for another operator, and for more than `MOST_NODES`.
    """
    model, used = _complete(content, where)
    if sum(used.values()) > MOST_NODES:
        raise GraphRefused(
            f"{where}: expected at most {MOST_NODES} nodes, found {sum(used.values())}: export the network "
            "without unrolled loops"
        )
    allowed = EXPORTED | IMPORTED | QUANTISED | FURTHER | {*operators}
    others = [name for name in used if name not in allowed]
    if others:
        named = ", ".join(name[:64] for name in others[:_MOST_NAMED])
        raise GraphRefused(
            f"{where}: expected operators that Locum's networks have, found {named}: export the network "
            "without them, or allow them with LOCUM_GRAPH_OPERATORS if you trust the graph"
        )
    return model


def parse_graph(content: bytes, where: str) -> ModelProto:
    """Parse a graph that does not run here: its tensors are read, or it was checked before.

    Raises:
        GraphRefused: it is no onnx graph, or it has external data, a function, a training graph, options for
            a session, or fields that are not onnx's.
    """
    return _complete(content, where)[0]


def _complete(content: bytes, where: str) -> tuple[ModelProto, Counter[str]]:
    """Parse a graph, check that it is complete in itself, and count its nodes by operator."""
    # Imported late: listings, and processes that serve no network, do without it.
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model: ModelProto = onnx.load_from_string(content)
    except DecodeError as error:
        raise GraphRefused(
            f"{where}: expected an onnx graph, found other bytes: export the network again"
        ) from error
    if model.functions:
        raise GraphRefused(
            f"{where}: expected a graph without functions, found {model.functions[0].name[:64]!r}: put their "
            "nodes into the graph (onnx.inliner.inline_local_functions)"
        )
    if model.training_info:
        raise GraphRefused(f"{where}: expected a graph for inference, found one for training too: remove it")
    if any(entry.key == _OPTIONS_IN_METADATA for entry in model.metadata_props):
        raise GraphRefused(
            f"{where}: expected no '{_OPTIONS_IN_METADATA}' in the metadata, found it: remove it"
        )
    used: Counter[str] = Counter()
    for message in _messages(model, where):
        if isinstance(message, onnx.TensorProto):
            if message.data_location != onnx.TensorProto.DEFAULT or message.external_data:
                raise GraphRefused(
                    f"{where}: expected every tensor inside of the graph, found that the data of tensor "
                    f"'{message.name[:64]}' are in another file, {_location(message)!r}: save the graph with "
                    "its data inside (onnx.save_model with save_as_external_data=False)"
                )
        elif isinstance(message, onnx.NodeProto):
            own = message.domain in _OWN_DOMAINS
            used[message.op_type if own else f"{message.domain}:{message.op_type}"] += 1
    return model, used


def _location(tensor: Any) -> str:
    return next((entry.value[:64] for entry in tensor.external_data if entry.key == "location"), "")


def _messages(message: Any, where: str) -> Iterator[Any]:
    """Walk a message and all in it: subgraphs, attributes, sparse tensors, and what onnx may add.

    Raises GraphRefused for fields that this version of onnx does not know: onnxruntime's may.
    """
    from google.protobuf.unknown_fields import UnknownFieldSet

    name = type(message).__name__
    if len(UnknownFieldSet(message)):
        raise GraphRefused(
            f"{where}: expected fields that onnx defines, found others in a {name}: export the network again "
            "for an earlier version of onnx"
        )
    yield message
    # Listing the fields of a tensor copies its data, and it holds no further ones.
    if name != "TensorProto":
        for field, value in message.ListFields():
            if field.message_type is not None:
                for each in value if field.is_repeated else (value,):
                    yield from _messages(each, where)
