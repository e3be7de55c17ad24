"""The graph of a network with a pool (FedIns), cut at its query: what an image asks with, and its answer.

A volume's slices are answered by one query, the mean of theirs, and onnxruntime runs all of a graph, whatever
is asked of it: hence two sessions. A choice within one (`If`) costs more: convolutions are laid out for the
processor only in a graph that owns its weights, and branches that share them do not. An image on its own
takes as long by halves as by the whole, whose session beside them would hold the weights once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import onnx
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.utils import Extractor
from onnxruntime import OrtValue

IMAGE = "image"
QUERY = "query"
# Smaller ones, shapes and axes among them, stay within the graph, where they are read while it is optimised.
_LARGE = 1024


class Part(NamedTuple):
    """A graph's bytes, and those of its weights, by name, that lie outside."""

    graph: bytes
    weights: Mapping[str, OrtValue]


def parts_of(graph: bytes) -> tuple[Part, ...]:
    """`graph` alone; of one that has a query, what gives it and what takes it, which share their weights.

    Raises what onnx raises for bytes that are no graph.
    """
    model = onnx.load_from_string(graph)
    outputs = [output.name for output in model.graph.output]
    if QUERY not in outputs:
        return (Part(graph, {}),)
    weights = dict(_moved_out(model))
    extractor = Extractor(model)
    halves = (
        extractor.extract_model([IMAGE], [QUERY]),
        extractor.extract_model([IMAGE, QUERY], [name for name in outputs if name != QUERY]),
    )
    return tuple(_part(half, weights) for half in halves)


def _part(half: ModelProto, weights: Mapping[str, OrtValue]) -> Part:
    names = (tensor.name for tensor in half.graph.initializer if tensor.name in weights)
    return Part(half.SerializeToString(), {name: weights[name] for name in names})


def _moved_out(model: ModelProto) -> Iterator[tuple[str, OrtValue]]:
    """The large weights of a graph, by name, while they are moved out of it."""
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= _LARGE:
            yield tensor.name, OrtValue.ortvalue_from_numpy(numpy_helper.to_array(tensor))
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="memory")
