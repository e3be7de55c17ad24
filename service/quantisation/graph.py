"""Turn a float32 graph into one in int8, or in float16, of the same weights.

int8 by onnxruntime's static quantisation: convolutions and what stands between them take integers, by scales
that are found on a few scans. The graph has QuantizeLinear and DequantizeLinear nodes (QDQ), which
onnxruntime and OpenVINO turn into integer kernels, each in its own way.
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from model_store.errors import GraphRefused
from model_store.graphs import parse_graph
from model_store.manifest import Reduced

if TYPE_CHECKING:
    import onnx

IMAGE = "image"
_CONVOLUTION = "Conv"
_METHODS = {"minmax": "MinMax", "percentile": "Percentile", "entropy": "Entropy"}


@dataclass(frozen=True)
class Recipe:
    """How scales are found, and which convolutions stay in float32.

    `minmax` takes the extremes, `percentile` cuts off one of 100,000 values at each end, `entropy` is that of
    onnxruntime. `per_channel` gives each channel of a weight its scale. With `seven_bits`, weights have 7
    bits: processors without VNNI add two products in 16 bits, which 8 bits can overflow, so that the same
    graph would give other masks there.
    """

    scales: Literal["minmax", "percentile", "entropy"] = "percentile"
    per_channel: bool = True
    first_in_float: bool = True
    last_in_float: bool = True
    seven_bits: bool = True


# `python -m benchmarks run quantised` compares it with others.
RECIPE = Recipe()
_PERCENTILE = 99.999


def reduced(
    graph: bytes, precision: Reduced, slices: Sequence[NDArray[np.float32]], recipe: Recipe = RECIPE
) -> bytes:
    """The graph in another precision. Equal arguments give equal bytes.

    Args:
        graph: an onnx file that was checked, in float32.
        precision: of the new one.
        slices: network input [C, ...] that the scales of int8 are found on; float16 needs none.
        recipe: of int8.

    Raises:
        GraphRefused: the graph has no convolution, or cannot be converted.
        ValueError: int8 without slices.
    """
    model = parse_graph(graph, "graph")
    if precision == "float16":
        return _halved(model)
    if not slices:
        raise ValueError("expected slices that find the scales, found none")
    return _quantised(model, slices, recipe)


def _quantised(model: onnx.ModelProto, slices: Sequence[NDArray[np.float32]], recipe: Recipe) -> bytes:
    # Imported late: a service that answers needs none of it.
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    for number, node in enumerate(model.graph.node):
        # Nodes are left out by name, and graphs from elsewhere need not have names.
        node.name = node.name or f"node_{number}"
    convolutions = [node.name for node in model.graph.node if node.op_type == _CONVOLUTION]
    if not convolutions:
        raise GraphRefused("expected a graph with convolutions, found none: keep it in float32")
    # Its progress is printed.
    with (
        tempfile.TemporaryDirectory(prefix="locum-") as folder,
        redirect_stdout(io.StringIO()),
        _quiet(),
    ):
        path = Path(folder) / "int8.onnx"
        quantize_static(
            model,
            path,
            _Slices(slices),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=recipe.per_channel,
            reduce_range=recipe.seven_bits,
            calibrate_method=getattr(CalibrationMethod, _METHODS[recipe.scales]),
            # The first has so few channels that it is slower in integers; the last decides between classes
            # that are nearly as probable, so that its rounding is the mask's.
            nodes_to_exclude=[
                *(convolutions[:1] if recipe.first_in_float else ()),
                *(convolutions[-1:] if recipe.last_in_float else ()),
            ],
            # The activations of one slice at a time are in memory.
            extra_options={"CalibPercentile": _PERCENTILE, "CalibStridedMinMax": 1},
        )
        return path.read_bytes()


def _halved(model: onnx.ModelProto) -> bytes:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with _quiet():
        # Input and output stay float32: the same scan goes in, and the same probabilities come out.
        halved: onnx.ModelProto = convert_float_to_float16(model, keep_io_types=True)
    content: bytes = halved.SerializeToString()
    return content


class _Slices:
    """One slice at a time, as onnxruntime's calibration reads them."""

    def __init__(self, slices: Sequence[NDArray[np.float32]]) -> None:
        self._slices, self._next, self._end = slices, 0, len(slices)

    def __len__(self) -> int:
        return len(self._slices)

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        """The next slice, [1, C, ...]; None after the last."""
        if self._next == self._end:
            return None
        self._next += 1
        return {IMAGE: np.ascontiguousarray(self._slices[self._next - 1][np.newaxis])}

    def set_range(self, start_index: int, end_index: int) -> None:
        """Read these next."""
        self._next, self._end = start_index, end_index


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice on pre-processing that onnxruntime gives of every graph, by the root logger."""

    def of_others(record: logging.LogRecord) -> bool:
        return "onnxruntime" not in record.pathname

    logging.root.addFilter(of_others)
    try:
        yield
    finally:
        logging.root.removeFilter(of_others)
