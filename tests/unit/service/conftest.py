"""A network small enough to be worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx
import pytest
from onnx import TensorProto, helper


@pytest.fixture(scope="session")
def threshold_graph() -> Callable[..., bytes]:
    """`threshold_graph(at=0.5)`: the onnx file of a two-class network, sure of foreground above `at`.

    logits = (0, 8 (x - at)), so p(foreground) = sigmoid(8 (x - at)).
    """

    def build(at: float = 0.5, slope: float = 8.0, output: str = "probabilities") -> bytes:
        weights = helper.make_tensor("w", TensorProto.FLOAT, [2, 1, 1, 1], [0.0, slope])
        bias = helper.make_tensor("b", TensorProto.FLOAT, [2], [0.0, -slope * at])
        nodes = [
            helper.make_node("Conv", ["image", "w", "b"], ["logits"], kernel_shape=[1, 1]),
            helper.make_node("Softmax", ["logits"], [output], axis=1),
        ]
        graph = helper.make_graph(
            nodes,
            "threshold",
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["B", 1, "H", "W"])],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["B", 2, "H", "W"])],
            [weights, bias],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        onnx.checker.check_model(model)
        content: bytes = model.SerializeToString()
        return content

    return build


@pytest.fixture(scope="session")
def sigmoid() -> Callable[[float], float]:
    """1 / (1 + exp(-x))."""
    return lambda x: 1 / (1 + math.exp(-x))
