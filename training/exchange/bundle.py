"""A MONAI bundle, as a folder or a zip file, as a network and its task.

What is read: `configs/metadata.json` (names of channels and labels), `configs/inference.json|yaml`
(`network_def`, `preprocessing`, `inferer`, `postprocessing`), `models/model.pt` and `LICENSE`. MONAI's own
parser is not used: it imports and evaluates what a bundle says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from pydantic import JsonValue

from model_store.digest import sha256
from model_store.guard import FOREGROUND, ReferenceStatistics
from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.errors import NetworkError
from personalization.networks import outline
from training.errors import ImportRefused
from training.exchange import checkpoints
from training.exchange.config import MOST_BYTES, Config, Plain
from training.exchange.imported import (
    Imported,
    channel_names,
    described,
    made,
    reference_of,
    slug,
    stored_axes,
)
from training.exchange.source import Source
from training.exchange.transforms import after_network, before_network

_CONFIGS: Final = tuple(f"configs/inference.{suffix}" for suffix in ("json", "yaml", "yml"))
_METADATA: Final = ("configs/metadata.json", "metadata.json")
_WEIGHTS: Final = ("models/model.pt", "models/model.pth", "model.pt")
# The only file of such a name, where none of these is there.
_OTHER_WEIGHTS: Final = re.compile(r"models/[^/]+\.(pt|pth)")
_TORCHSCRIPT: Final = ("models/model.ts", "model.ts")
_LICENCES: Final = ("LICENSE", "LICENSE.txt", "LICENSE.md", "docs/LICENSE", "docs/data_license.txt")
_AS_IT_IS: Final = ("$@network_def.to(@device)", "$@network_def", "@network_def")
_NETS: Final = "monai.networks.nets"
_DIMENSIONS: Final = 3
_LONGEST_LICENCE = 120
# What Locum writes into the metadata of a bundle that it exports: the task, and the digest of the
# configuration.
OWN: Final = "locum"


def read(
    source: Source,
    *,
    declared: Mapping[str, Plain] | None = None,
    labels: Mapping[str, Sequence[int]] | None = None,
    without: Collection[str] = (),
    inside: str = "",
) -> Imported:
    """Read a bundle.

    Args:
        declared: values for places of the configuration that are expressions.
        labels: name and mask values of each output channel, in their order, without the background.
        without: names of transforms to leave out.
        inside: path of the bundle's folder, or the end of it, where `source` has several.

    Raises ImportRefused, which names the place in the bundle and what the user can declare.
    """
    where = str(source.path / source.enter(_METADATA[0], inside=inside))
    metadata = _metadata(source)
    config = _config(source, declared)
    network = _network(config)
    own = None if declared or labels or without else _exported(source, metadata, config, network)
    task, notes = own or _translated(source, metadata, config, network, labels, without)
    file, content = _weights(source)
    state = _state(network, content, f"{where}: {file}")
    told: dict[str, JsonValue] = {
        "version": str(metadata.get("version", ""))[:64],
        "declared": {place: _as_json(value) for place, value in (declared or {}).items()},
        "without": [*sorted(without)],
    }
    return Imported(
        task=task,
        network=network,
        state=state,
        form="MONAI bundle",
        weights=described(
            file,
            [content],
            str(metadata.get("name") or source.path.name),
            _licence(source, metadata),
        ),
        details={key: value for key, value in told.items() if value},
        statistics=_training_scans(task),
        notes=(*notes, *stored_axes(task)),
    )


def _exported(
    source: Source, metadata: Mapping[str, Any], config: Config, network: NetworkSpec
) -> tuple[Task, tuple[str, ...]] | None:
    """The task of a bundle that Locum wrote; None of another, and of one that was changed since.

    Raises ImportRefused for a task that the network does not fit.
    """
    found = metadata.get(OWN)
    if not isinstance(found, Mapping) or found.get("inference") != sha256(
        source.read(config.where, MOST_BYTES)
    ):
        return None
    where = f"{source.path}: {_METADATA[0]}: {OWN}"
    task = made(where, **(found["task"] if isinstance(found.get("task"), dict) else {}))
    sides = network.arguments["in_channels"], network.arguments["classes"]
    if task.geometry is None or (task.in_channels, task.out_channels) != sides:
        raise ImportRefused(
            f"{where}: expected a task of volumes with {sides[0]} channels and {sides[1]} classes, as the "
            f"network has, found {task.in_channels} and {task.out_channels}: export the version again"
        )
    return task, ("the task is that of the version which Locum exported, as its metadata.json has it",)


def _translated(
    source: Source,
    metadata: Mapping[str, Any],
    config: Config,
    network: NetworkSpec,
    labels: Mapping[str, Sequence[int]] | None,
    without: Collection[str],
) -> tuple[Task, tuple[str, ...]]:
    """The task that the bundle's transforms say, and notes. Raises ImportRefused."""
    where = str(source.path)
    channels, classes = network.arguments["in_channels"], network.arguments["classes"]
    assert isinstance(channels, int)
    assert isinstance(classes, int)
    modality = _modality(metadata)
    reading = before_network(config, _place(config, "preprocessing"), channels, modality, without)
    answer = after_network(config, "postprocessing", without)
    window = _window(config)
    if reading.padded is not None and any(
        side > own for side, own in zip(reading.padded, window["patch"], strict=True)
    ):
        raise ImportRefused(
            f"{config.where}: preprocessing: SpatialPad to {reading.padded}: expected at most the window's "
            f"{window['patch']}, which is padded to anyway: add --without SpatialPadd if masks are "
            "acceptable without it"
        )
    regions = answer.activation == "sigmoid" or answer.discrete == "threshold"
    if regions and answer.discrete == "argmax":
        raise ImportRefused(
            f"{config.where}: postprocessing: expected softmax with argmax or sigmoid with threshold"
        )
    names = channel_names(
        _named(metadata, "inputs", "image", channels)
        or reading.joined
        or [f"channel {i}" for i in range(channels)]
    )
    normalisations = reading.normalisations
    named = _labels(metadata, classes, regions, labels, where)
    task = made(
        where,
        name=slug(str(metadata.get("name") or source.path.stem)),
        labels=named,
        regions=tuple(named) if regions else (),
        keep_largest=_kept(answer.largest, named, where),
        **(
            {"normalisation": normalisations[0]}
            if channels == 1
            else {
                "channels": [
                    {"name": name, "normalisation": each}
                    for name, each in zip(names, normalisations, strict=True)
                ]
            }
        ),
        **({"modality": modality} if modality else {}),
        geometry={
            # Resampling to its own grid alone leaves a scan as it is.
            "spacing": reading.spacing if any(reading.spacing or ()) else None,
            "axes": reading.axes,
            "resampling": "monai",
            "normalise": "after" if reading.after else "before",
            "crop": reading.crop,
            "average": "logits",
            "restore": answer.restore or "probabilities",
            **window,
        },
    )
    return task, (*reading.notes, *answer.notes, *_notes(config))


def _metadata(source: Source) -> Mapping[str, Any]:
    name = next((each for each in _METADATA if source.has(each)), None)
    if name is None:
        raise ImportRefused(
            f"{source.path}: expected configs/metadata.json of a MONAI bundle, found none: name the "
            "bundle's own "
            "folder or zip file"
        )
    try:
        found = json.loads(source.read(name, MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise ImportRefused(f"{source.path}: {name}: cannot be read as JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise ImportRefused(f"{source.path}: {name}: expected a mapping, found {type(found).__name__}")
    return found


def _config(source: Source, declared: Mapping[str, Plain] | None) -> Config:
    name = next((each for each in _CONFIGS if source.has(each)), None)
    if name is None:
        raise ImportRefused(f"{source.path}: expected one of {', '.join(_CONFIGS)}, found none")
    return Config.parse(name, source.read(name, MOST_BYTES), declared)


def _place(config: Config, place: str) -> str:
    if not config.has(place):
        raise ImportRefused(
            f"{config.where}: expected `{place}`, found none: Locum reads a bundle's inference"
        )
    return place


def _network(config: Config) -> NetworkSpec:
    """The network by the allow-list. Raises ImportRefused."""
    # Its import takes seconds.
    from personalization.networks.monai.translation import translated

    written = config.component(_place(config, "network_def"))
    module, _, name = written.target.rpartition(".")
    if module and not f"{module}.".startswith(f"{_NETS}."):
        raise written.refuse(
            f"expected a network of {_NETS}, found {written.target[:96]!r}: code of a bundle is not run; "
            "export the "
            "network to onnx where it runs, and use `import onnx`"
        )
    arguments = {each: written.value(each) for each in written.arguments if each != "pretrained"}
    try:
        own, translated_arguments = translated(name, arguments)
    except NetworkError as error:
        raise written.refuse(
            f"{error}. A network that is not on the list can be exported to onnx where it runs: `import onnx`"
        ) from error
    if translated_arguments.get("spatial_dims") != _DIMENSIONS:
        raise written.refuse(
            "expected spatial_dims 3, found another number: MONAI runs a 2-D network slice by slice on the "
            "scan's own "
            "pixels, and Locum on slices of a fixed size; export it to onnx and use `import onnx` with a "
            "task.yaml"
        )
    return NetworkSpec(name=own, arguments=translated_arguments)


def _state(network: NetworkSpec, content: bytes, where: str) -> dict[str, Any]:
    from personalization.networks.monai.translation import translated_state

    found = checkpoints.state_of(checkpoints.load(content, where), len(content), where)
    try:
        wanted = outline(network.name, **network.arguments).state_dict()
    except NetworkError as error:
        raise ImportRefused(f"{where}: {error}") from error
    return translated_state(network.name, checkpoints.by_names(found, wanted, where))


def _weights(source: Source) -> tuple[str, bytes]:
    name = next((each for each in _WEIGHTS if source.has(each)), None)
    if name is None and len(others := [each for each in source.names if _OTHER_WEIGHTS.fullmatch(each)]) == 1:
        (name,) = others
    if name is None:
        script = next((each for each in _TORCHSCRIPT if source.has(each)), None)
        urls = " (large_files.yml names its address)" if source.has("large_files.yml") else ""
        reason = (
            f"{script}: TorchScript has code, which would run here: ask for the state dict, "
            "models/model.pt, or export "
            "the network to onnx where it was made and use `import onnx`"
            if script
            else f"expected the weights in {_WEIGHTS[0]}, found {', '.join(others)[:300] or 'none'}{urls}"
        )
        raise ImportRefused(f"{source.path}: {reason}")
    return name, source.read(name, checkpoints.MOST_BYTES)


def _window(config: Config) -> dict[str, Any]:
    """The fields of the geometry that the inferer says."""
    inferer = config.component(_place(config, "inferer"))
    if inferer.name != "SlidingWindowInferer":
        raise inferer.refuse(
            "expected SlidingWindowInferer with the patch of training as its window: declare one with --set "
            '"inferer={_target_: SlidingWindowInferer, roi_size: [96, 96, 96], overlap: 0.5}"'
        )
    roi = inferer.value("roi_size")
    sides = [roi] * _DIMENSIONS if isinstance(roi, int) else roi
    if (
        not isinstance(sides, list)
        or len(sides) != _DIMENSIONS
        or not all(isinstance(s, int) and s > 0 for s in sides)
    ):
        raise inferer.refuse(
            f"expected 3 sides of a window, found {roi!r}: declare them with --set "
            f"{inferer.place}::roi_size=[x,y,z]"
        )
    overlap = inferer.value("overlap", 0.25)
    shares = {*overlap} if isinstance(overlap, list) else {overlap}
    mode = inferer.value("mode", "constant")
    sigma = inferer.value("sigma_scale", 0.125)
    if len(shares) != 1 or mode not in ("constant", "gaussian") or sigma != 0.125:
        raise inferer.refuse(
            f"expected one overlap, mode constant or gaussian and sigma_scale 0.125, found {overlap!r}, "
            f"{mode!r}, "
            f"{sigma!r}"
        )
    return {"patch": sides, "overlap": shares.pop(), "window": mode}


def _notes(config: Config) -> tuple[str, ...]:
    notes = []
    padding = config.component("inferer").value("padding_mode", "constant")
    if padding not in ("constant", None):
        notes.append(
            f"the bundle pads scans smaller than its window by {str(padding)[:32]!r}, Locum with zeros: "
            "masks of larger scans are not affected"
        )
    if config.has("network") and str(config.written("network")).replace(" ", "") not in _AS_IT_IS:
        notes.append(
            "the bundle changes what its network answers (`network`), which is not read: answers can differ "
            "from the bundle's"
        )
    return tuple(notes)


def _modality(metadata: Mapping[str, Any]) -> str | None:
    image = _entry(metadata, "inputs", "image")
    found = str(image.get("modality", "")).upper()
    known = {"CT": "CT", "MR": "MR", "MRI": "MR", "PET": "PT", "PT": "PT"}
    return known.get(found)


def _training_scans(task: Task) -> ReferenceStatistics | None:
    """What the bundle says of its scans: their intensities, by the window that it scales from."""
    windows = [
        step.window
        for step in task.channel_list[0].normalisation.ordered_steps
        if step.step != "zscore" and step.window is not None
    ]
    return reference_of(task.channel_count, 0, {FOREGROUND: windows[0]} if windows else {})


def _labels(
    metadata: Mapping[str, Any],
    classes: int,
    regions: bool,
    declared: Mapping[str, Sequence[int]] | None,
    where: str,
) -> dict[str, tuple[int, ...]]:
    wanted = classes if regions else classes - 1
    if declared:
        if len(declared) != wanted:
            raise ImportRefused(
                f"{where}: expected --label for each of {wanted} output channels, in their order, found "
                f"{len(declared)}"
            )
        found = {name: tuple(values) for name, values in declared.items()}
        if not regions and sorted(value for values in found.values() for value in values) != [
            *range(1, classes)
        ]:
            raise ImportRefused(
                f"{where}: expected labels with the values 1 to {wanted}, one each, found {found}"
            )
        return found
    names = _named(metadata, "outputs", "pred", classes)
    if names is None:
        raise ImportRefused(
            f"{where}: configs/metadata.json: expected names of {classes} output channels in "
            "network_data_format / "
            "outputs / pred / channel_def, found others: declare them with --label NAME=VALUE for each "
            "channel but "
            "the background"
        )
    if regions:
        raise ImportRefused(
            f"{where}: its {classes} outputs ({', '.join(names)[:200]}) are regions that overlap "
            "(sigmoid), and a "
            "bundle does not say which mask values each has: declare them in this order, as --label "
            f"'{names[0]}=1,2' --label …"
        )
    return {name: (index,) for index, name in enumerate(names) if index}


def _kept(values: Sequence[int] | None, labels: Mapping[str, tuple[int, ...]], where: str) -> tuple[str, ...]:
    """The labels of which the largest component is kept; without values, all.

    Raises ImportRefused for a value that no label has.
    """
    if values is None:
        return ()
    known = {value: name for name, own in labels.items() for value in own}
    if strange := [value for value in values if value not in known]:
        raise ImportRefused(
            f"{where}: postprocessing: KeepLargestConnectedComponent: expected mask values of {[*known]}, "
            f"found {strange}"
        )
    return tuple(dict.fromkeys(known[value] for value in (values or known)))


def _named(metadata: Mapping[str, Any], side: str, key: str, count: int) -> list[str] | None:
    """Names of the channels by `channel_def`, None where they are not one for each."""
    named = _entry(metadata, side, key).get("channel_def")
    if not isinstance(named, Mapping) or {*named} != {str(index) for index in range(count)}:
        return None
    names = [" ".join(str(named[str(index)]).split())[:64] for index in range(count)]
    return names if len({*names}) == count and all(names) else None


def _entry(metadata: Mapping[str, Any], side: str, key: str) -> Mapping[str, Any]:
    found: Any = metadata
    for part in ("network_data_format", side, key):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _licence(source: Source, metadata: Mapping[str, Any]) -> str | None:
    """The stated licence: of the metadata, else the first line of the licence's file."""
    stated = metadata.get("license") or metadata.get("licence")
    if isinstance(stated, str) and stated.strip():
        return " ".join(stated.split())[:_LONGEST_LICENCE]
    for name in _LICENCES:
        if source.has(name):
            text = source.read(name, MOST_BYTES).decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return re.sub(r"\s+", " ", " ".join(lines[:2]))[:_LONGEST_LICENCE] or None
    return None


def _as_json(value: Plain) -> JsonValue:
    return json.loads(json.dumps(value, default=str))  # type: ignore[no-any-return]
