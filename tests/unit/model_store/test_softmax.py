"""A softmax in passes: onnxruntime's own probabilities to rounding, its bits alone and among others."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from model_store.softmax import drop_softmax, softmax_of, write_softmax_in_passes

SHAPES = [(2, 2, 24, 17), (1, 8, 31, 9), (1, 25, 12, 9, 10), (1, 105, 7, 6, 5), (3, 3, 40)]


def graph(
    shape: tuple[int, ...], *, opset: int = 18, axis: int = 1, last: str = "Softmax"
) -> onnx.ModelProto:
    dims = ["B", shape[1], *(f"s{n}" for n in shape[2:])]
    values = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)
        for name in ("image", "logits", "probabilities")
    }
    named = {} if last == "Sigmoid" else {"axis": axis}
    nodes = [
        helper.make_node("Identity", ["image"], ["logits"]),
        helper.make_node(last, ["logits"], ["probabilities"], **named),
    ]
    outputs = [values["probabilities"], values["logits"]]
    made = helper.make_graph(nodes, "g", [values["image"]], outputs)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def answer(model: onnx.ModelProto, images: Any) -> Any:
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["probabilities"], {"image": images})[0]


def logits(shape: tuple[int, ...]) -> Any:
    """With equal classes, and with values that an exponential of them alone would not survive."""
    found = (np.random.default_rng(0).normal(size=shape) * 5).astype(np.float32)
    found[:, :, 0], found[:, :, 1] = 0, 200
    found[:, 0, 2] = -1000
    return found


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_passes_give_the_probabilities_of_softmax(shape: tuple[int, ...], opset: int) -> None:
    images, model = logits(shape), graph(shape, opset=opset)
    expected = answer(model, images)
    assert write_softmax_in_passes(model)
    assert not [node for node in model.graph.node if node.op_type == "Softmax"]
    found = answer(model, images)
    assert np.abs(found - expected).max() <= 2e-6
    np.testing.assert_array_equal(found.argmax(axis=1), expected.argmax(axis=1))
    # It is no worse an approximation: the worst error of both, beside float64.
    exact = np.exp(images.astype(float) - images.max(axis=1, keepdims=True))
    exact /= exact.sum(axis=1, keepdims=True)
    assert np.abs(found - exact).max() <= 2 * np.abs(expected - exact).max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_image_has_the_same_bits_alone_and_among_others(shape: tuple[int, ...]) -> None:
    images, model = logits(shape)[:1], graph(shape)
    assert write_softmax_in_passes(model)
    together = np.concatenate([images[:, ::-1] / 2, images, images])
    assert answer(model, together)[1].tobytes() == answer(model, images)[0].tobytes()


@pytest.mark.parametrize(
    "model",
    [
        graph((1, 3, 8, 8), axis=3),
        graph((1, 3, 8, 8), opset=12),
        graph((1, 3, 8, 8), last="Sigmoid"),
        graph((1, 3)),
    ],
    ids=["another axis", "an earlier softmax", "a sigmoid", "classes of images"],
)
def test_what_ends_otherwise_stays_as_it_is(model: onnx.ModelProto) -> None:
    before = model.SerializeToString()
    assert softmax_of(model) is None
    assert not write_softmax_in_passes(model)
    assert not drop_softmax(model, "logits")
    assert model.SerializeToString() == before


@pytest.mark.parametrize("declared", ["K", 7])
def test_what_is_declared_of_the_classes_does_not_matter(declared: str | int) -> None:
    images, model = logits((2, 3, 8, 8)), graph((2, 3, 8, 8))
    expected = answer(model, images)
    side = model.graph.output[0].type.tensor_type.shape.dim[1]
    if isinstance(declared, str):
        side.dim_param = declared
    else:
        side.dim_value = declared
    assert write_softmax_in_passes(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    assert np.abs(session.run(["probabilities"], {"image": images})[0] - expected).max() <= 1e-6


def test_a_softmax_of_an_output_is_dropped_and_one_that_is_read_stays() -> None:
    model = graph((1, 3, 8, 8))
    assert not drop_softmax(model, "others")
    read = graph((1, 3, 8, 8))
    read.graph.node.append(helper.make_node("Neg", ["probabilities"], ["negative"]))
    assert not drop_softmax(read, "logits")
    assert drop_softmax(model, "logits")
    assert [each.name for each in model.graph.output] == ["logits"]
    onnx.checker.check_model(model, full_check=True)
