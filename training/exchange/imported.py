"""What an importer found, and its publication as a version of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import JsonValue, ValidationError
from torch import Tensor

from model_store.artefact import Artefact
from model_store.digest import sha256
from model_store.errors import LocumStoreError
from model_store.guard import Range, ReferenceStatistics
from model_store.manifest import (
    GRAPH,
    IMPORTED,
    WEIGHTS,
    ImportedWeights,
    Lineage,
    ModelManifest,
    NetworkSpec,
)
from model_store.misfits import misfits
from model_store.store import Store
from model_store.task import Task
from personalization.errors import PersonalizationError
from personalization.export import to_onnx
from personalization.networks import build, outline
from personalization.state import to_safetensors
from training.errors import ImportRefused
from training.exchange import checkpoints
from training.publish import check_names, software

_LONGEST_NAME = 64
_LONGEST_CHANNEL = 32
_LONGEST_TEXT, _LONGEST_LICENCE = 500, 200


@dataclass(frozen=True)
class Imported:
    """A network with its weights by Locum's names, its task, and where they are from.

    `form` is the kind of files; `details` has what else was found in them, and what the user declared.
    `graph` is a finished onnx file; it is exported from the network where there is none. `statistics` is
    what the files say of the training scans, for the guard. `notes` tell the user in which respects the
    version may answer differently from the original.
    """

    task: Task
    network: NetworkSpec
    state: Mapping[str, Tensor]
    form: str
    weights: ImportedWeights
    details: Mapping[str, JsonValue] = field(default_factory=dict)
    graph: bytes | None = None
    statistics: ReferenceStatistics | None = None
    notes: tuple[str, ...] = ()


def keeping_largest(imported: Imported, labels: Sequence[str]) -> Imported:
    """The same, of which answers keep the largest component of `labels` alone, whatever its files say.

    Raises ImportRefused for what is no label.
    """
    content = imported.task.model_dump(mode="json")
    task = made(imported.weights.file, **{**content, "keep_largest": list(labels)})
    return replace(imported, task=task)


def stored_axes(task: Task) -> tuple[str, ...]:
    """The note on a network that takes the axes as a file stores them; nothing of another."""
    if task.geometry is None or not task.geometry.axes.islower():
        return ()
    return (
        "the network takes the axes as a file stores them, so that a scan which is stored in another "
        "direction than the training files is answered otherwise: --axes LPS, RAS and so on says how those "
        "were stored, and turns every scan to it",
    )


def turned(imported: Imported, codes: str) -> Imported:
    """Turn every scan to how the training files were stored: `codes`, such as LPS, is
    where their axes i, j and k point.

    Raises ImportRefused for other codes, and for a network that takes the patient's axes already.
    """
    geometry, where = imported.task.geometry, imported.weights.file
    if geometry is None or not geometry.axes.islower():
        axes = "slices" if geometry is None else geometry.axes
        raise ImportRefused(
            f"{where}: --axes {codes[:16]}: expected a network that takes axes as a file stores them, found "
            f"one that takes {axes}: leave it out"
        )
    if len(codes) != len(geometry.axes):
        raise ImportRefused(f"{where}: --axes {codes[:16]}: expected three directions, such as LPS or RAS")
    content = imported.task.model_dump(mode="json")
    content["geometry"]["axes"] = "".join(codes.upper()["ijk".index(axis)] for axis in geometry.axes)
    said = stored_axes(imported.task)
    return replace(
        imported,
        task=made(where, **content),
        details={**imported.details, "axes": codes.upper()},
        notes=tuple(note for note in imported.notes if note not in said),
    )


def publish(store: Store, name: str, imported: Imported, licence: str | None = None) -> Artefact:
    """Publish a model under `name`. Equal content is one version. `licence` takes the place of the stated
    one.

    Raises ImportRefused when the weights do not fit the network, the network does not fit the task, or the
    store refuses the version.
    """
    check_names(name)
    task = imported.task
    state: Mapping[str, Tensor] = imported.state
    try:
        graph = imported.graph
        if graph is None:
            # A few words can ask for a network that fills the memory: it is compared before it is built.
            drawn = outline(imported.network.name, **imported.network.arguments)
            checkpoints.check_fits(drawn, imported.state, imported.weights.file)
            network = build(imported.network.name, **imported.network.arguments)
            state = checkpoints.fill(network, imported.state, imported.weights.file)
            averaged = task.geometry is not None and task.geometry.average == "logits"
            graph = to_onnx(
                network.eval(),
                task.in_channels,
                task.input_shape,
                regions=bool(task.regions),
                logits=averaged,
            )
        manifest = ModelManifest(
            name=name,
            task=task,
            network=imported.network,
            statistics=imported.statistics,
            lineage=Lineage(
                method=IMPORTED,
                run="",
                sites=(),
                rounds=0,
                seed=0,
                weights=imported.weights.model_copy(update={"licence": licence} if licence else {}),
                details={"form": imported.form, **imported.details},
            ),
            software=software(),
        )
        return store.publish(manifest, {WEIGHTS: to_safetensors(state), GRAPH: graph})
    except (LocumStoreError, PersonalizationError) as error:
        raise ImportRefused(f"{imported.weights.file}: cannot be published as '{name}': {error}") from error


def reference_of(
    channels: int, count: int, ranges: Mapping[str, tuple[float, float]]
) -> ReferenceStatistics | None:
    """What is known of `count` training volumes (0: an unknown number); None where no range is.

    `ranges` are those of `model_store.guard`.
    """
    if not ranges:
        return None
    # Three channels in one file may be colours.
    kinds = (["colour", "grey"] if channels == 3 else []) + (
        ["grey"] if channels == 1 else [f"{channels}-channel"]
    )
    return ReferenceStatistics(
        count=count,
        kinds={f"{kind} volume": count for kind in kinds},
        ranges={name: Range(low=low, high=high) for name, (low, high) in sorted(ranges.items())},
    )


def made(where: str, **fields: Any) -> Task:
    """Make a task. Raises ImportRefused naming `where` and every field that is wrong."""
    try:
        return Task.model_validate(fields)
    except ValidationError as error:
        raise ImportRefused(f"{where}: the task: {'; '.join(misfits(Task, error, values=True))}") from error


def described(file: str, contents: Iterable[bytes], origin: str, licence: str | None) -> ImportedWeights:
    """Describe the weights of a file, or of several, within the lengths that a manifest has."""
    return ImportedWeights(
        file=file[:_LONGEST_TEXT],
        sha256=_digest_of(contents),
        origin=origin[:_LONGEST_TEXT] or None,
        licence=(licence or "")[:_LONGEST_LICENCE] or None,
    )


def _digest_of(contents: Iterable[bytes]) -> str:
    """The digest of a file, or of several in their order."""
    files = list(contents)
    if len(files) == 1:
        return sha256(files[0])
    return sha256("".join(map(sha256, files)).encode())


def slug(text: str) -> str:
    """A name for a task out of free text."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST_NAME]
    return found or "imported"


def channel_names(texts: Sequence[str]) -> list[str]:
    """Names of channels as a task has them, out of free text: different ones, in the given order."""
    names: list[str] = []
    for index, text in enumerate(texts):
        name = re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:_LONGEST_CHANNEL] or f"channel-{index}"
        taken = {each.lower() for each in names}
        names.append(f"{name[: _LONGEST_CHANNEL - 3]}-{index}" if name.lower() in taken else name)
    return names
