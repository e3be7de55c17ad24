"""An onnx file and a task.yaml: for every network that Locum cannot build itself.

The graph is served as it is. Its network is unknown, so that no recipe that learns or moves weights can adapt
it; its version can be routed to, judged, assigned and rolled back like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from model_store.errors import LocumStoreError
from model_store.graphs import check_graph
from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.export import INPUT, LOGITS, OUTPUT
from personalization.options.movable import OPAQUE
from training.errors import ImportRefused
from training.exchange.imported import Imported, described

MOST_BYTES: Final = 2 << 30
_TOLERANCE = 1e-3


def read(path: Path, task_file: Path, operators: Sequence[str] = ()) -> Imported:
    """Read a graph and run it once on a random input, to see that it answers with probabilities.

    The graph has one input float32 [B, C, *input] and one output float32 [B, K, *input] of probabilities
    (softmax, or sigmoid for regions). They may have any names: they become `image` and `probabilities`.

    Raises ImportRefused for a graph with operators that are not allowed, another input or output than the
    task has, or an answer that is no probability.
    """
    try:
        task = Task.load(task_file)
        content = path.read_bytes()[: MOST_BYTES + 1]
        if len(content) > MOST_BYTES:
            raise ImportRefused(f"{path}: expected at most {MOST_BYTES >> 30} GiB, found more")
        model = check_graph(content, str(path), operators)
    except (OSError, LocumStoreError) as error:
        raise ImportRefused(str(error)) from error
    shape = [task.in_channels, *task.input_shape]
    answers = [*task.output_shape]
    initial = {each.name for each in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in initial]
    outputs = list(model.graph.output)
    if len(inputs) != 1 or not outputs:
        raise ImportRefused(
            f"{path}: expected one input and an output, found {len(inputs)} and {len(outputs)}"
        )
    for role, found, wanted in (("input", inputs[0], shape), ("output", outputs[0], answers)):
        _check_shape(path, role, found, wanted)
    graph = _renamed(model, inputs[0].name, outputs[0].name)
    _check_answer(path, graph, shape, answers, regions=bool(task.regions))
    return Imported(
        task=task,
        network=NetworkSpec(
            name=OPAQUE, arguments={"in_channels": task.in_channels, "classes": task.out_channels}
        ),
        state={},
        form="onnx",
        weights=described(path.name, [content], "", None),
        graph=graph,
        notes=("the version is a graph alone: recipes that change a network's weights refuse it",),
    )


def _check_shape(path: Path, role: str, found: Any, wanted: Sequence[int]) -> None:
    import onnx

    kind = found.type.tensor_type
    sides = [side.dim_value if side.HasField("dim_value") else None for side in kind.shape.dim]
    fits = len(sides) == len(wanted) + 1 and all(
        side in (None, expected) for side, expected in zip(sides[1:], wanted, strict=True)
    )
    if kind.elem_type != onnx.TensorProto.FLOAT or not fits:
        text = ", ".join("?" if side is None else str(side) for side in sides)
        raise ImportRefused(
            f"{path}: {role} '{found.name[:64]}': expected float32 [B, {', '.join(map(str, wanted))}] by "
            "the task, found "
            f"{onnx.TensorProto.DataType.Name(kind.elem_type).lower()} [{text}]: correct task.yaml or "
            "export it again"
        )


def _renamed(model: Any, found_input: str, found_output: str) -> bytes:
    """The graph with the names that the service asks for. Outputs that it does not know are left out."""
    names = {found_input: INPUT, found_output: OUTPUT}
    taken = {name for node in model.graph.node for name in (*node.input, *node.output)}
    # A name that is taken inside by another tensor makes room.
    names |= {name: f"{name}.inner" for name in (INPUT, OUTPUT) if name in taken and name not in names}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for each in (*model.graph.initializer, *model.graph.value_info, *model.graph.input, *model.graph.output):
        each.name = names.get(each.name, each.name)
    kept = [each for each in model.graph.output if each.name in (OUTPUT, LOGITS)]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    serialised: bytes = model.SerializeToString(deterministic=True)
    return serialised


def _check_answer(
    path: Path, graph: bytes, shape: Sequence[int], answers: Sequence[int], *, regions: bool
) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    image = np.random.default_rng(0).normal(size=(1, *shape)).astype(np.float32)
    try:
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        (found,) = session.run([OUTPUT], {INPUT: image})
    except Exception as error:  # onnxruntime's errors share no other base
        raise ImportRefused(f"{path}: it does not run: {str(error)[:300]}") from error
    expected = (1, *answers)
    whole = found.shape == expected and bool(np.isfinite(found).all())
    whole = whole and found.min() >= -_TOLERANCE and found.max() <= 1 + _TOLERANCE
    if whole and (regions or np.abs(found.sum(1) - 1).max() <= _TOLERANCE):
        return
    what = "a sigmoid" if regions else "a softmax over the classes"
    raise ImportRefused(
        f"{path}: expected probabilities {list(expected)}, found values from {np.nanmin(found):.3g} to "
        f"{np.nanmax(found):.3g} of {list(found.shape)}: export the network with {what} at its end"
    )
