"""The start of a run: a version of the store, or weights from elsewhere, in place of a draw.

A version has to fit wholly: retraining, more rounds, a new member. Weights from elsewhere fit but for what is
new, the head at least, which is drawn from the run's seed. Both are an artefact of the store, by digest: the
server reads it, and sends it in the first round as it sends any weights. Only sites that draw a part of their
own read it too, each from its own store.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from model_store.artefact import MANIFEST, Artefact
from model_store.digest import sha256
from model_store.errors import LocumStoreError
from model_store.graphs import check_graph
from model_store.manifest import (
    GRAPH,
    WEIGHTS,
    Lineage,
    ModelManifest,
    NetworkSpec,
    PersonalModelsManifest,
    RoutingSpaceManifest,
    parse_manifest,
)
from model_store.store import Store
from model_store.task import Task
from personalization.errors import NetworkError
from personalization.export import INPUT, OUTPUT, to_onnx
from personalization.networks import outline
from personalization.networks.capabilities import head_paths, traits_of
from personalization.networks.published import network_from_published
from personalization.networks.registry import check_origin
from personalization.networks.vit_weights import check_fits
from personalization.state import State, from_safetensors, to_safetensors
from training.algorithm import State as AnyState
from training.choices.network import NetworkConfig
from training.config import Descent
from training.errors import ConfigurationError
from training.local.networks import new_network, shapes_of, state_of
from training.publish import check_names, software
from training.weights.files import Weights, is_file

_PART = "start"
# What a network's arguments have from the task.
_OF_TASK = ("in_channels", "classes")
# Between the probabilities of a network and of its graph.
_SAME = 1e-3


class StartConfig(NetworkConfig):
    """Configuration of a method in which one network is trained from a start that can be given."""

    start: str | None = Field(
        None, description="NAME@VERSION in the store, or a file of weights, to start from; as `--from`"
    )
    start_new: tuple[str, ...] = Field(
        (), description="parts of the network that the start does not have; found by the run"
    )
    # Not part of the run's identity: the pinned reference holds the digest.
    store: Path | None = Field(
        None, exclude=True, description="where the start is; `--out` on a command line"
    )

    @property
    def is_judged(self) -> bool:
        """Whether the start answers scans by itself, so that what is made of it can be compared with it."""
        return self.start is not None and not self.start_new

    @override
    def prepared(self, store: Store, task: Task, name: str) -> Self:
        """With the start resolved to one digest in `store`, and its network.

        Raises ConfigurationError for a start that is not there or does not fit the task.
        """
        if self.start is None:
            return self
        if is_file(self.start):
            artefact = _imported(self, store, Path(self.start), task, name)
        else:
            artefact = _version(store, self.start)
        model = _model_of(store, artefact)
        spec = model.expect(ModelManifest).manifest.network
        _check(self, model, task, str(artefact))
        new = model.manifest.lineage.details.get("new", [])
        assert isinstance(new, list)
        arguments = {key: value for key, value in spec.arguments.items() if key not in _OF_TASK}
        changes = {
            "start": f"{artefact.name}@{artefact.digest}",
            "start_new": tuple(map(str, new)),
            "store": store.root.resolve() if isinstance(store.root, Path) else store.root,
            "network": spec.name,
            "network_arguments": arguments,
        }
        return self.model_copy(update=changes)

    @override
    def at_hospital(self, store: Path | None) -> Self:
        return self.model_copy(update={"store": store})

    @override
    def descent(self) -> Descent:
        if self.start is None:
            return Descent()
        artefact = self._artefact()
        return Descent((artefact.digest,), artefact.manifest.lineage.weights)

    def started(self, drawn: AnyState) -> AnyState:
        """The weights that training starts from: `drawn`, but for what the start has.

        Raises ConfigurationError where the start cannot be read.
        """
        if self.start is None:
            return drawn
        found = self.start_state()
        return {
            name: tensor if _is_new(name, self.start_new) else found[name] for name, tensor in drawn.items()
        }

    def start_state(self) -> AnyState:
        """The weights of the start, the same objects at every call. Raises ConfigurationError."""
        assert self.start is not None
        if self.store is None:
            raise _missing(self.start)
        return _state(str(self.store), self.start)

    def check_reads_start(self) -> None:
        """Raise ConfigurationError where a site that draws a part of its own cannot read the start."""
        if self.start is not None and self.store is None:
            raise _missing(self.start)

    def _artefact(self) -> Artefact:
        assert self.start is not None
        if self.store is None:
            raise _missing(self.start)
        return _opened(Store(self.store), self.start)


def _missing(start: str) -> ConfigurationError:
    return ConfigurationError(
        "the start of the run cannot be read",
        [
            f"a part of the network is each site's own and starts at {start}: give this hospital's store, "
            "which has that version, with --store"
        ],
    )


@lru_cache(maxsize=2)
def _state(store: str, reference: str) -> State:
    opened = Store(store)
    try:
        model = _model_of(opened, _opened(opened, reference))
        return from_safetensors(model.read(WEIGHTS))
    except LocumStoreError as error:
        raise ConfigurationError("the start of the run cannot be read", [str(error)]) from error


def _opened(store: Store, reference: str) -> Artefact:
    try:
        return store.open(reference, verify=False)
    except LocumStoreError as error:
        raise ConfigurationError("the start of the run cannot be opened", [f"--from: {error}"]) from error


def _version(store: Store, asked: str) -> Artefact:
    """A version that is named exactly: a run that is resumed after it published has to find the same one."""
    artefact = _opened(store, asked)
    if "@" not in asked:
        raise ConfigurationError(
            "the start of the run is not one version",
            [f"--from: expected NAME@VERSION, found '{asked}'; the newest is {artefact}"],
        )
    return artefact


def _model_of(store: Store, artefact: Artefact) -> Artefact:
    """The one network that training can start from: the model, or the global model of a composite."""
    manifest = artefact.manifest
    try:
        if isinstance(manifest, RoutingSpaceManifest):
            return store.by_digest(manifest.global_model)
        if isinstance(manifest, PersonalModelsManifest) and manifest.global_model is not None:
            return store.by_digest(manifest.global_model)
    except LocumStoreError as error:
        raise ConfigurationError("the start of the run cannot be opened", [f"--from: {error}"]) from error
    if not isinstance(manifest, ModelManifest):
        parts = ", ".join(manifest.references())
        raise ConfigurationError(
            f"a run cannot start from '{artefact}'",
            [
                f"expected a model, or a composite with a global model, found a {manifest.kind} of {parts}; "
                "name one of its parts"
            ],
        )
    if manifest.hospital is not None:
        raise ConfigurationError(
            f"a run cannot start from '{artefact}'",
            [
                f"it was adapted to '{manifest.hospital}' and belongs to that hospital; start from what it "
                "was made of"
            ],
        )
    return artefact


def _check(config: StartConfig, model: Artefact, task: Task, asked: str) -> None:
    """Raise ConfigurationError with all reasons why the task or the chosen network does not fit."""
    manifest = model.expect(ModelManifest).manifest
    known, spec = manifest.task, manifest.network
    try:
        check_origin(spec.name, spec.origin)
    except NetworkError as error:
        raise ConfigurationError(f"'{asked}' cannot be started from", [str(error)]) from error
    problems = [
        f"expected {what} {_said(here)} as the task has, found {_said(there)}"
        for what, here, there in (
            ("the kind", task.kind, known.kind),
            ("the input channels", task.in_channels, known.in_channels),
            ("the labels", list(task.labels or task.class_names), list(known.labels or known.class_names)),
        )
        if here != there
    ]
    if problems:
        problems.append(
            f"for other labels, start from the file of its weights, --from STORE/{model.name}/…/{WEIGHTS}: "
            "the head is then new"
        )
    if config.network not in (None, spec.name):
        problems.append(f"network: expected {spec.name}, which the start has, found {config.network}")
    wrong = {
        key: value
        for key, value in config.network_arguments.items()
        if key not in _OF_TASK and spec.arguments.get(key, value) != value
    }
    problems += [
        f"network_arguments: expected {key} {spec.arguments[key]}, which the start has, found {value}"
        for key, value in wrong.items()
    ]
    try:
        traits_of(outline(spec.name, **spec.arguments)).check_sides(task.input_shape, spec.name)
    except NetworkError as error:
        problems.append(str(error))
    if problems:
        raise ConfigurationError(f"a run on '{task.name}' cannot start from '{asked}'", problems)


def _said(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_new(name: str, new: tuple[str, ...]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in new)


def _imported(config: StartConfig, store: Store, path: Path, task: Task, name: str) -> Artefact:
    """Publish a file's weights as the part `NAME.start`, with what they are and what is new."""
    check_names(name, (_PART,))
    try:
        weights = Weights.read(path)
        said = _said_beside(path, weights)
        if said is not None:
            config = _with_network(config, said.network)
            _check_answer(said, weights.tensors, path)
        spec, state = network_from(weights.tensors, config, task, str(path))
        traits_of(outline(spec.name, **spec.arguments)).check_sides(task.input_shape, spec.name)
    except (OSError, NetworkError, ConfigurationError, LocumStoreError) as error:
        raise ConfigurationError(f"a run cannot start from {path}", [str(error)]) from error
    # What is new is drawn from the run's seed; the artefact needs some values there.
    drawn = state_of(new_network(spec, torch.Generator().manual_seed(0)))
    new = _new_modules(drawn, state)
    whole = {key: state.get(key, tensor) for key, tensor in drawn.items()}
    network = new_network(spec, torch.Generator().manual_seed(0))
    network.load_state_dict(whole)
    lineage = Lineage(
        method="imported", run="", sites=(), rounds=0, seed=0, weights=weights.source, details={"new": new}
    )
    manifest = ModelManifest(
        name=f"{name}.{_PART}",
        part_of=name,
        role=_PART,
        task=task,
        network=spec,
        lineage=lineage,
        software=software(),
    )
    files = {WEIGHTS: to_safetensors(whole), GRAPH: to_onnx(network, task.in_channels, task.input_shape)}
    return store.publish(manifest, files)


def _said_beside(path: Path, weights: Weights) -> ModelManifest | None:
    """The manifest beside the weights of a version; None of any other file.

    Names and shapes do not say all of a network: activations, strides and kinds of norm without parameters
    are in its arguments.
    """
    try:
        manifest = parse_manifest((path.parent / MANIFEST).read_bytes(), str(path.parent))
    except (OSError, LocumStoreError):
        return None
    entry = manifest.files.get(path.name)
    if not isinstance(manifest, ModelManifest) or entry is None or entry.sha256 != weights.source.sha256:
        return None
    return manifest


def _with_network(config: StartConfig, said: NetworkSpec) -> StartConfig:
    """The configuration with the file's own network. Raises ConfigurationError where another was chosen."""
    arguments = {key: value for key, value in said.arguments.items() if key not in _OF_TASK}
    chosen: dict[str, tuple[Any, Any]] = (
        {} if config.network is None else {"network": (said.name, config.network)}
    )
    chosen |= {key: (arguments.get(key), value) for key, value in config.network_arguments.items()}
    problems = [
        f"{name}: expected {there}, with which the file was trained, found {here}; leave it out"
        for name, (there, here) in chosen.items()
        if there != here
    ]
    if problems:
        raise ConfigurationError("the file's weights are of another network", problems)
    return config.model_copy(update={"network": said.name, "network_arguments": arguments})


def _check_answer(said: ModelManifest, tensors: State, path: Path) -> None:
    """Check that the network of a manifest answers an image as the graph beside it, that was published.

    Raises ConfigurationError.
    """
    import onnxruntime  # a command's help does not need it

    entry, graph = said.files.get(GRAPH), path.parent / GRAPH
    if entry is None or not graph.is_file() or sha256(content := graph.read_bytes()) != entry.sha256:
        return
    network = new_network(said.network, torch.Generator().manual_seed(0))
    check_fits(tensors, shapes_of(said.network), f"{path}, for the network {said.network.name}")
    network.load_state_dict(dict(tensors))
    draw = torch.Generator().manual_seed(0)
    image = torch.randn(1, said.task.in_channels, *said.task.input_shape, generator=draw)
    check_graph(content, str(graph))
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (expected,) = session.run([OUTPUT], {INPUT: image.numpy()})
    with torch.no_grad():
        logits = network.eval()(image)
    found = torch.sigmoid(logits) if said.task.regions else torch.softmax(logits, dim=1)
    apart = float((found - torch.from_numpy(expected)).abs().max())
    if not apart <= _SAME:
        raise ConfigurationError(
            "the file's weights do not answer as when they were published",
            [
                f"expected the probabilities of {GRAPH} beside it to {_SAME:g}, found {apart:.2g} apart: "
                f"{said.network.name} is another network in this version of Locum, or of its package"
            ],
        )


def network_from(
    tensors: Mapping[str, Tensor], config: NetworkConfig, task: Task, where: str
) -> tuple[NetworkSpec, State]:
    """The network that a file's weights are of, and its tensors under our names without what is new.

    Known are published weights (`personalization.networks.published`), and those of Locum's own networks, of
    which the output's layer may be another or missing. Raises NetworkError or ConfigurationError.
    """
    known = network_from_published(
        tensors, task.kind, task.in_channels, task.out_channels, task.size, config.width, where
    )
    if known is not None:
        name, arguments, state = known
        return NetworkSpec(name=name, arguments=arguments), state
    spec = config.network_for(task)
    expected = shapes_of(spec)
    output = (head_paths(outline(spec.name, **spec.arguments))[-1],)
    fitting = {
        name: tensor
        for name, tensor in tensors.items()
        if not (_is_new(name, output) and (name not in expected or tensor.shape != expected[name].shape))
    }
    if len([name for name in fitting if _is_new(name, output)]) < len(
        [name for name in expected if _is_new(name, output)]
    ):
        fitting = _without(fitting, output)
        expected = _without(expected, output)
    check_fits(fitting, expected, f"{where}, for the network {spec.name}")
    return spec, {name: tensor.to(expected[name].dtype) for name, tensor in fitting.items()}


def _without(state: Mapping[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    return {name: tensor for name, tensor in state.items() if not _is_new(name, paths)}


def _new_modules(whole: State, found: State) -> list[Any]:
    """The outermost modules of which no tensor was found."""
    new: list[Any] = []
    for name in whole:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if not any(_is_new(other, (path,)) for other in found):
                if path not in new:
                    new.append(path)
                break
    return new
