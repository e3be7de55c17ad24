"""The one graph that is served: query, top-C, gather, mean and adapted forward, every weight stored once.

Input "image" [B, C, H, W]. Outputs "probabilities"; "entries" int64 and "similarities" float32 [B, C], what
each image picked; "query" [B, Q], what it was looked up by.

Two more inputs may be left out, and serve to treat all slices of a volume alike:

    only_query   bool: the adapted pass is not run, and there are no probabilities (B = 0)
    given_query  [G, Q]: with one row (G = 1), the query of all images, which therefore pick the same entries;
                 "entries" and "similarities" have one row, and the query's pass is not run. Of no row, the
                 default, each image has its own

Each pass lies in a branch of an If; the weights that both use lie outside.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from personalization.errors import ExportError
from personalization.export import OUTPUT, to_onnx
from personalization.instance.network import QUERY, InstanceAdaptive

GIVEN = "given_query"
ONLY_QUERY = "only_query"


def to_graph(network: InstanceAdaptive, size: tuple[int, int]) -> bytes:
    """The onnx graph of `network` for images of `size`, as one file's bytes: equal weights, equal bytes.

    Raises as `to_onnx`.
    """
    model = onnx.load_from_string(to_onnx(network, network.backbone.in_channels, size))
    graph = model.graph
    width = network.backbone.query_width
    shape = [
        dimension.dim_value
        for value in graph.output
        for dimension in value.type.tensor_type.shape.dim[1:]
        if value.name == OUTPUT
    ]
    # Read once: the field makes new objects each time, and nodes are told apart by identity here.
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    names = {value.name for value in graph.output}
    given = helper.make_graph(
        [helper.make_node("Identity", [GIVEN], ["taken"])], "given", [], [_floats("taken", [None, width])]
    )
    rows = [
        helper.make_node("Shape", [GIVEN], ["given_rows"], start=0, end=1),
        helper.make_node("Squeeze", ["given_rows"], ["given_row"]),
        helper.make_node("Cast", ["given_row"], ["is_given"], to=TensorProto.BOOL),
    ]
    nodes = [*rows, *_behind_a_choice(nodes, _floats(QUERY, [None, width]), names, "is_given", given)]
    nothing = helper.make_tensor("nothing", TensorProto.FLOAT, [0, *shape], b"", raw=True)
    none = helper.make_graph(
        [helper.make_node("Constant", [], ["none"], value=nothing)],
        "none",
        [],
        [_floats("none", [0, *shape])],
    )
    nodes = _behind_a_choice(nodes, _floats(OUTPUT, [None, *shape]), names, ONLY_QUERY, none)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.extend(
        [_floats(GIVEN, ["G", width]), helper.make_tensor_value_info(ONLY_QUERY, TensorProto.BOOL, [])]
    )
    graph.initializer.append(helper.make_tensor(GIVEN, TensorProto.FLOAT, [0, width], b"", raw=True))
    graph.initializer.append(helper.make_tensor(ONLY_QUERY, TensorProto.BOOL, [], b"\0", raw=True))
    # Shapes of what is between, inferred before nodes went into branches.
    del graph.value_info[:]
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _floats(name: str, shape: Sequence[int | str | None]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _behind_a_choice(
    nodes: Sequence[NodeProto],
    output: ValueInfoProto,
    outputs: Collection[str],
    condition: str,
    instead: GraphProto,
) -> list[NodeProto]:
    """The nodes, what only `output` is made from being run where `condition` is false, else `instead`."""
    moved = _only_behind(nodes, output.name, outputs)
    if not moved:
        raise ExportError(f"the graph has no output '{output.name}' with a pass of its own")
    known = {id(node) for node in moved}
    kept = [node for node in nodes if id(node) not in known]
    inner = f"own_{output.name}"
    needed = {name for node in moved for name in node.input}
    for node in moved:
        node.output[:] = [inner if name == output.name else name for name in node.output]
    body = helper.make_graph(moved, inner, [], [ValueInfoProto(name=inner, type=output.type)])
    choice = helper.make_node("If", [condition], [output.name], then_branch=instead, else_branch=body)
    # What the branch takes from outside comes before it, what takes its output after it.
    first = _made_for(kept, {*needed, condition})
    before = [node for node in kept if id(node) in first]
    return [*before, choice, *(node for node in kept if id(node) not in first)]


def _only_behind(nodes: Sequence[NodeProto], output: str, outputs: Collection[str]) -> list[NodeProto]:
    """The nodes, in order, that `output` is made from and nothing else is."""
    wanted = {*outputs} - {output}
    behind = _made_for(nodes, {output})
    branch: list[NodeProto] = []
    for node in reversed(nodes):
        if id(node) in behind and not wanted & {*node.output}:
            branch.append(node)
        else:
            # Who reads the output itself reads what the choice gives.
            wanted |= _read_by(node) - {output}
    return branch[::-1]


def _made_for(nodes: Sequence[NodeProto], names: Collection[str]) -> set[int]:
    """The nodes, by id, that anything of `names` is made from."""
    needed, found = {*names}, set[int]()
    for node in reversed(nodes):
        if needed & {*node.output}:
            found.add(id(node))
            needed |= _read_by(node)
    return found


def _read_by(node: NodeProto) -> set[str]:
    """What a node reads, its branches included."""
    inside = {
        name
        for attribute in node.attribute
        if attribute.HasField("g")
        for inner in attribute.g.node
        for name in _read_by(inner)
    }
    return {*node.input, *inside}
