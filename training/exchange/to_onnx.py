"""Write a version's graph as an onnx file for another runtime, behind its lens where it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model_store.artefact import Artefact
from model_store.durable import write_durably
from model_store.errors import KindMismatch, LocumStoreError
from model_store.graphs import parse_graph
from model_store.lens import lens_of
from model_store.lens.graph import with_lens
from model_store.manifest import GRAPH, BaseManifest, ModelManifest
from model_store.normalisation import Clip, Normalisation, Rescale, ZScore
from model_store.softmax import write_softmax_in_passes
from model_store.task import Task
from training.errors import ImportRefused, in_words


def write(artefact: Artefact[BaseManifest], out: Path) -> tuple[str, ...]:
    """Write the new file `out`, and return what its caller has to know, in lines.

    Raises ImportRefused for a version that is no single network, for a lens of volumes, and where `out` is
    there already or cannot be written.
    """
    try:
        found = artefact.expect(ModelManifest)
    except KindMismatch as error:
        raise ImportRefused(f"{error}; of a composite, name its part (`brain.global@1`)") from error
    if out.exists():
        raise ImportRefused(f"{out}: expected a new file, found one: name another, or delete it")
    task = found.manifest.task
    try:
        content, lens = found.read(GRAPH), lens_of(found)
        if lens is not None:
            content = with_lens(content, lens, task.input_shape, str(artefact))
        model = parse_graph(content, str(artefact))
        rewritten = write_softmax_in_passes(model)
        if rewritten:
            content = model.SerializeToString(deterministic=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_durably(out, content)
    except (OSError, LocumStoreError) as error:
        raise ImportRefused(in_words(error)) from error
    graph = model.graph
    initial = {each.name for each in graph.initializer}
    lines = [f"input {_in_words(each)}" for each in graph.input if each.name not in initial]
    lines += [f"output {_in_words(each)}" for each in graph.output]
    lines.append(f"before it: {'; '.join(_before(task))}")
    if lens is not None and lens.steps:
        lines.append(f"in it: the lens ({', '.join(lens.steps)})")
    if rewritten:
        lines.append("its softmax is written in passes: a receipt names the version's own graph")
    if lens is not None and lens.negated:
        lines.append("a run takes all images of one scan, and of no other: the lens negates all or none")
    return tuple(lines)


def _in_words(value: Any) -> str:
    """An input or output of a graph: its name, type and shape."""
    from onnx import TensorProto

    kind = value.type.tensor_type
    sides = [str(side.dim_value) if side.HasField("dim_value") else side.dim_param for side in kind.shape.dim]
    name = {"float": "float32", "double": "float64"}
    found = TensorProto.DataType.Name(kind.elem_type).lower()
    return f"{value.name}: {name.get(found, found)} [{', '.join(side or '?' for side in sides)}]"


def _before(task: Task) -> list[str]:
    """What a scan goes through before the graph, in its order."""
    geometry = task.geometry
    if geometry is None:
        middle = "" if task.normalisation.middle == 1 else f"the middle {task.normalisation.middle:g} of "
        normalised = _normalised(task.normalisation, f"{middle}each {task.normalisation.scope}")
        size = f"each slice resized to {task.size[0]} x {task.size[1]} (height x width, bilinear)"
        count = f"{task.neighbours} neighbour{'s' if task.neighbours > 1 else ''}"
        beside = f"with {count} on either side as channels" if task.neighbours else ""
        return [each for each in (f"{task.plane} slices", *normalised, size, beside) if each]
    channels = task.channel_list
    alike = all(each.normalisation == channels[0].normalisation for each in channels)
    normalised = [
        f"{'' if alike else f'{each.name}: '}{step}"
        for each in (channels[:1] if alike else channels)
        for step in _normalised(each.normalisation, "the volume")
    ]
    spacing = (
        ""
        if geometry.spacing is None
        else " x ".join("its own" if mm is None else f"{mm:g}" for mm in geometry.spacing)
    )
    resampled = [f"resampled to {spacing} mm ({geometry.resampling})"] if spacing else []
    steps = [*normalised, *resampled] if geometry.normalise == "before" else [*resampled, *normalised]
    cropped = ["cropped to what is not zero"] if geometry.crop == "nonzero" else []
    windows = f"windows that overlap by {geometry.overlap:g} ({geometry.window})"
    return [f"axes {geometry.axes}", *cropped, *steps, windows]


def _normalised(normalisation: Normalisation, scope: str) -> list[str]:
    found = []
    for step in normalisation.ordered_steps:
        within = "" if step.within == "all" else f", {step.within} alone"
        if isinstance(step, ZScore):
            mean = f"the mean of {scope}" if step.mean is None else f"{step.mean:g}"
            deviation = f"the deviation of {scope}" if step.std is None else f"{step.std:g}"
            found.append(f"less {mean}, divided by {deviation}{within}")
        elif isinstance(step, Clip):
            found.append(f"clipped to {_range(step, scope)}{within}")
        else:
            ends = ", clipped" if step.clip else ""
            found.append(f"{_range(step, scope)} mapped to {list(step.to)}{ends}{within}")
    return found


def _range(step: Clip | Rescale, scope: str) -> str:
    if step.window is not None:
        return str([*step.window])
    if step.percentiles is None:
        return f"least to most of {scope}"
    low, high = step.percentiles
    return f"percentiles {low:g} to {high:g} of {scope}"
