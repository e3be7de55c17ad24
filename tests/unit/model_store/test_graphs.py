"""Graphs: refused where they name other files, have unknown operators or parts without a bound."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import SparseTensorProto, TensorProto, helper

from model_store import graphs
from model_store.errors import GraphRefused
from model_store.graphs import check_graph, operators_of, parse_graph
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.store import Store
from model_store.task import Task
from tests.helpers.model_store.graphs import (
    endless_graph,
    external,
    network_of,
    plant,
    spying_graph,
    subgraph_of,
    to_bytes,
)

MANIFEST = ModelManifest(
    name="spy",
    task=Task(name="t", labels={"a": (1,)}, size=(32, 32)),
    network=NetworkSpec(name="unet", arguments={}),
    lineage=Lineage(method="fedavg", run="r", sites=(), rounds=1, seed=0),
)


def _identity(**attributes: Any) -> onnx.NodeProto:
    return helper.make_node("Identity", ["image"], ["shown"], **attributes)


def _sparse(values: TensorProto, indices: TensorProto) -> SparseTensorProto:
    return SparseTensorProto(values=values, indices=indices, dims=[8])


def _function() -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["shown"], value=external("f", 8))
    function = helper.make_function("local", "F", [], ["shown"], [node], [helper.make_opsetid("", 18)])
    model = network_of([_identity()])
    model.functions.append(function)
    return model


INSIDE = helper.make_tensor("inside", TensorProto.INT64, [1], [0])
PLACES: dict[str, Callable[[], onnx.ModelProto]] = {
    "initializer": lambda: network_of([_identity()], [external("f", 8)]),
    "values of a sparse initializer": lambda: network_of(
        [_identity()], sparse_initializer=[_sparse(external("f", 8), INSIDE)]
    ),
    "indices of a sparse initializer": lambda: network_of(
        [_identity()], sparse_initializer=[_sparse(INSIDE, external("f", 8))]
    ),
    "tensor of an attribute": lambda: network_of([_identity(value=external("f", 8))]),
    "tensors of an attribute": lambda: network_of([_identity(values=[INSIDE, external("f", 8)])]),
    "sparse tensor of an attribute": lambda: network_of([_identity(value=_sparse(external("f", 8), INSIDE))]),
    "subgraph": lambda: network_of([_identity(body=subgraph_of(INSIDE, external("f", 8)))]),
    "subgraph of a subgraph": lambda: network_of(
        [_identity(body=helper.make_graph([_identity(body=subgraph_of(external("f", 8)))], "outer", [], []))]
    ),
    "graphs of an attribute": lambda: network_of([_identity(bodies=[subgraph_of(external("f", 8))])]),
}


@pytest.mark.parametrize("place", PLACES)
def test_external_data_is_refused_wherever_it_is(place: str) -> None:
    for read in (check_graph, parse_graph):
        with pytest.raises(GraphRefused, match=r"^brain: graph.onnx: .*'stolen' are in another file, 'f'"):
            read(to_bytes(PLACES[place]()), "brain: graph.onnx")


def test_external_data_of_a_tensor_that_is_said_to_be_inside_is_refused() -> None:
    tensor = external("f", 8)
    tensor.ClearField("data_location")
    with pytest.raises(GraphRefused, match="another file"):
        check_graph(to_bytes(network_of([_identity()], [tensor])), "g")


@pytest.mark.parametrize(
    ("domain", "name", "shown"),
    [
        ("", "Loop", "Loop"),
        ("com.microsoft", "FusedConv", "com.microsoft:FusedConv"),
        ("mine", "Conv", "mine:Conv"),
    ],
)
def test_operator_outside_of_the_list_is_refused_unless_it_is_allowed(
    domain: str, name: str, shown: str
) -> None:
    content = to_bytes(network_of([helper.make_node(name, ["image"], ["shown"], domain=domain)]))
    with pytest.raises(GraphRefused, match=f"found {shown}: .*LOCUM_GRAPH_OPERATORS"):
        check_graph(content, "g")
    check_graph(content, "g", operators_of(f"If, {shown}"))
    parse_graph(content, "g")


def test_graph_of_too_many_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_NODES", 3)
    content = to_bytes(network_of([_identity() for _ in range(4)]))
    with pytest.raises(GraphRefused, match="expected at most 3 nodes, found 6"):
        check_graph(content, "g")
    parse_graph(content, "g")


def test_operator_inside_of_a_subgraph_is_refused() -> None:
    inner = helper.make_graph([helper.make_node("Scan", [], ["x"])], "inner", [], [])
    with pytest.raises(GraphRefused, match="found Scan"):
        check_graph(to_bytes(network_of([_identity(body=inner)])), "g")


@pytest.mark.parametrize("name", ["EPContext", "com.microsoft:EPContext"])
def test_operator_that_reads_files_cannot_be_allowed(name: str) -> None:
    with pytest.raises(ValueError, match="reads files"):
        operators_of(f"Loop,{name}")
    node = helper.make_node(
        "EPContext", ["image"], ["shown"], domain="com.microsoft", ep_cache_context="/etc/passwd"
    )
    with pytest.raises(GraphRefused, match="EPContext"):
        check_graph(to_bytes(network_of([node])), "g")


@pytest.mark.parametrize("text", ["Loop;If", "a b", "x:y:z", "../f"])
def test_operators_with_a_wrong_name_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected OPERATOR"):
        operators_of(text)


def test_functions_training_graphs_and_session_options_are_refused() -> None:
    training = network_of([_identity()])
    training.training_info.add()
    options = network_of([_identity()])
    options.metadata_props.add(key="ort_config", value="{}")
    for model, said in (
        (_function(), "functions, found 'F'"),
        (training, "training"),
        (options, "ort_config"),
    ):
        with pytest.raises(GraphRefused, match=said):
            check_graph(to_bytes(model), "g")


def test_field_that_this_onnx_does_not_know_is_refused() -> None:
    content = to_bytes(network_of([_identity()]))
    with pytest.raises(GraphRefused, match="found others in a ModelProto"):
        # Field 900, two bytes long.
        check_graph(content + b"\xa2\x38\x02hi", "g")


@pytest.mark.parametrize("content", [b"no graph", b"\x08\x0a" * 100 + b"\x08"])
def test_bytes_that_are_no_graph_are_refused(content: bytes) -> None:
    with pytest.raises(GraphRefused, match="g: expected an onnx graph"):
        check_graph(content, "g")


@pytest.mark.parametrize("file", [GRAPH, "scan.onnx"])
def test_publishing_a_graph_with_external_data_is_refused(tmp_path: Path, file: str) -> None:
    store = Store(tmp_path)
    files = {WEIGHTS: b"w", GRAPH: to_bytes(network_of([_identity()])), file: spying_graph("secret")}
    with pytest.raises(GraphRefused, match=rf"^spy: {file}: "):
        store.publish(MANIFEST, files)
    assert store.versions.names() == []


def test_opening_a_planted_graph_with_external_data_is_refused(tmp_path: Path) -> None:
    plant(tmp_path, MANIFEST, {WEIGHTS: b"w", GRAPH: spying_graph("secret")})
    with pytest.raises(GraphRefused, match=r"^spy@1: graph.onnx: .*another file, 'secret'"):
        Store(tmp_path).open("spy")


def test_store_with_further_operators_publishes_and_opens_what_another_refuses(tmp_path: Path) -> None:
    Store(tmp_path, operators=("Loop",)).publish(MANIFEST, {WEIGHTS: b"w", GRAPH: endless_graph()})
    with pytest.raises(GraphRefused, match="found Loop"):
        Store(tmp_path).open("spy")
    assert Store(tmp_path, operators=("Loop",)).open("spy").version == 1


ROOT = Path(__file__).parents[3]
# onnx's readers, and those of its messages.
READERS = {
    "load",
    "load_model",
    "load_from_string",
    "load_model_from_string",
    "load_tensor",
    "load_tensor_from_string",
    "load_external_data_for_model",
    "ParseFromString",
    "FromString",
    "MergeFromString",
}


def _called(module: Path) -> set[str]:
    """The functions of onnx's readers that a module names, however it imported them."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "onnx":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            # By another name it would not be seen below.
            assert not [each for each in node.names if each.name == "onnx" and each.asname], module
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("onnx."):
            found.add(node.attr)
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} - {"load"}
    return found & READERS


def test_no_module_but_one_reads_onnx() -> None:
    rooms = ("benchmarks", "locum", "model_store", "personalization", "service", "training", "tools")
    modules = [module for room in rooms for module in (ROOT / room).rglob("*.py")]
    readers = {str(each.relative_to(ROOT)) for each in modules if _called(each)}
    assert readers == {"model_store/graphs.py"}
