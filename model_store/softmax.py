"""Write the softmax that a graph ends in as nodes that a processor runs in a few passes.

onnxruntime's Softmax on a CPU works on the last axis alone: over the classes of an image it transposes the
whole tensor there and back. With z the logits [B, K, ...],

    p = exp(z - max_K z) / sum_K exp(z - max_K z)

takes ReduceMax, Sub, Exp, a sum and Div. The sum is a convolution with ones, and no ReduceSum: that adds in
another order for one image than for several, so that an image would get other bits in company, and loses
digits where there are many classes. How many ones is asked of the logits: what a graph declares may be wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

PROBABILITIES: Final = "probabilities"
# Softmax was another function before, and the sides of a later one's input are one axis.
_LEAST_OPSET = 13
# The axes of ReduceMax are an input from here on.
_AXES_ARE_INPUT = 18
# Of [B, K, ...]: a convolution has one to three sides.
_RANKS = (3, 4, 5)


def softmax_of(model: ModelProto) -> NodeProto | None:
    """The Softmax over the classes of images that gives the output `probabilities`, float32 [B, K, ...].

    None for a graph that ends in another node, and where the number of sides is not known.
    """
    from onnx import TensorProto

    outputs = {each.name: each.type for each in model.graph.output}
    node = next((node for node in model.graph.node if PROBABILITIES in node.output), None)
    if node is None or PROBABILITIES not in outputs or node.op_type != "Softmax" or node.domain:
        return None
    kind = outputs[PROBABILITIES].tensor_type
    axis = next((each.i for each in node.attribute if each.name == "axis"), -1)
    rank = len(kind.shape.dim)
    fits = rank in _RANKS and axis in (1, 1 - rank) and kind.elem_type == TensorProto.FLOAT
    return node if fits and _opset(model) >= _LEAST_OPSET else None


def write_softmax_in_passes(model: ModelProto) -> bool:
    """Replace `softmax_of` a graph, in place. Returns whether there was one; if not, it is as it was."""
    from onnx import helper, numpy_helper

    softmax = softmax_of(model)
    graph = model.graph
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    prefix = f"{PROBABILITIES}/"
    if softmax is None or any(name.startswith(prefix) for name in taken):
        return False
    output = next(each for each in graph.output if each.name == PROBABILITIES)
    sides = len(output.type.tensor_type.shape.dim) - 2
    numbers = {"first": [0], "one": [1], "two": [2], "sides": [1] * sides}
    tensors = (*numbers, "shape", "classes", "size", "ones", "max", "less", "exp", "sum")
    named = {name: prefix + name for name in tensors}
    graph.initializer.extend(
        numpy_helper.from_array(np.array(values, np.int64), named[name]) for name, values in numbers.items()
    )

    def node(operator: str, inputs: str, output: str, **attributes: Any) -> NodeProto:
        names = {**named, "logits": softmax.input[0], "probabilities": PROBABILITIES}
        return helper.make_node(
            operator, [names[each] for each in inputs.split()], [names[output]], **attributes
        )

    value = numpy_helper.from_array(np.ones(1, np.float32))
    if _opset(model) >= _AXES_ARE_INPUT:
        most = node("ReduceMax", "logits one", "max")
    else:
        most = node("ReduceMax", "logits", "max", axes=[1])
    made = [
        node("Shape", "logits", "shape"),
        node("Slice", "shape one two first", "classes"),
        node("Concat", "one classes sides", "size", axis=0),
        node("ConstantOfShape", "size", "ones", value=value),
        most,
        node("Sub", "logits max", "less"),
        node("Exp", "less", "exp"),
        node("Conv", "exp ones", "sum"),
        node("Div", "exp sum", "probabilities"),
    ]
    # Nodes are in an order in which each has its inputs.
    nodes = [new for each in graph.node for new in (made if PROBABILITIES in each.output else [each])]
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def drop_softmax(model: ModelProto, logits: str) -> bool:
    """Take the output `probabilities` off a graph with a softmax of its output `logits`, in place.

    Returns whether it was; if not, the graph is as it was.
    """
    softmax = softmax_of(model)
    names = [each.name for each in model.graph.output]
    if softmax is None or logits not in names or [*softmax.input] != [logits]:
        return False
    if any(PROBABILITIES in node.input for node in model.graph.node):
        return False
    model.graph.node.remove(softmax)
    del model.graph.output[names.index(PROBABILITIES)]
    return True


def _opset(model: ModelProto) -> int:
    return max((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), default=0)
